"""Conversion of the server's errors of a replication stream to the package's errors."""

from __future__ import annotations

import re

from pgcdc_assets.errors import (
    UNKNOWN_CAPTURE,
    ConfigurationError,
    ConnectionLost,
    DefiniteError,
    PgcdcError,
    SlotBusy,
    SlotLost,
    TransientError,
    renewal_command,
)
from pgcdc_assets.postgres.recovery_conflicts import CONFLICTS
from pgcdc_assets.postgres.slots.status import SlotWalStatus
from pgcdc_assets.postgres.stream.transport import ServerError

_OBJECT_IN_USE = "55006"
_UNDEFINED_OBJECT = "42704"
_NOT_IN_PREREQUISITE_STATE = "55000"
_UNDEFINED_FILE = "58P01"
_INSUFFICIENT_PRIVILEGE = "42501"
_INTERNAL_ERROR = "XX000"
# "filenode" before Postgres 16. ReorderBufferProcessTXN in
# src/backend/replication/logical/reorderbuffer.c notices the abort of a prepared transaction, but
# not in its subtransactions: their flags lack RBTXN_IS_PREPARED.
_UNMAPPED = re.compile(r"could not map file(number|node) ")

_PREVENTION = "raise max_slot_wal_keep_size (of a slot on a standby: set hot_standby_feedback = on)"

# What an output plugin reports of an error (output_plugin_error_callback() in
# src/backend/replication/logical/logical.c): slot, plugin, callback and LSN, in this order in each
# language. The server translates the words between them, and a letter may follow the callback.
_IN_CHANGE = re.compile(
    r"pgoutput\b.*?(?<![a-z_])(?:stream_)?change(?![a-z_]).*?([0-9A-F]+/[0-9A-F]+)"
)


# What Postgres 14 to 18 say of an invalidated slot, and the functions that say it in each language.
_INVALIDATED = re.compile(r"invalidated|can no longer|cannot read from")
_FUNCTIONS_OF_INVALIDATED = {
    "StartLogicalReplication",
    "ReplicationSlotAcquire",
    "pg_logical_slot_get_changes_guts",
}
# This function also reports a slot of another kind or database, without a detail message, and the
# copy of a primary's slot on a standby, with a hint.
_CREATE_CONTEXT = "CreateDecodingContext"

# The name of a WAL segment (XLogFileName() in src/include/access/xlog_internal.h).
_SEGMENT = re.compile(r"(?<![0-9A-F])[0-9A-F]{24}(?![0-9A-F])")

# A part of the context of each error while the server decodes WAL, in each language.
_PLUGIN = "pgoutput"


def stream_failure(
    server: str,
    slot: str,
    publication: str,
    error: ServerError,
    renewal: str = renewal_command(UNKNOWN_CAPTURE),
) -> PgcdcError:
    """Return the package's error for an error of START_REPLICATION or of the running stream.

    Args:
        server: `ConnectionSettings.describe()`.
        slot: the slot's name.
        publication: the publication's name.
        error: the server's error. SQLSTATE codes: Postgres documentation, Appendix A.
        renewal: the command that begins a new epoch.
    """
    sqlstate, message = error.sqlstate, error.message
    reason = message.rstrip(".")
    if sqlstate == _OBJECT_IN_USE:
        holder = re.search(r"PID (\d+)", message)
        return SlotBusy(
            slot=slot,
            active_pid=int(holder[1]) if holder else None,
            application_name="another walsender",
        )
    if sqlstate == _UNDEFINED_OBJECT and _PLUGIN in error.context and _has(message, publication):
        return DefiniteError(
            reason=f"{server}: {reason} as of the WAL position of slot {slot}: publication "
            f"{publication} was dropped and re-created, renamed, or created after the slot. The "
            "slot cannot send the changes of the time without a publication of this name. Nothing "
            "of them was confirmed. Begin a new epoch, with new snapshots of the tables, with "
            f"{renewal}."
        )
    if _is_invalidated(error) or (sqlstate == _UNDEFINED_FILE and _SEGMENT.search(message)):
        # The server does not say why: `pgcdc status` and the next start read invalidation_reason.
        return SlotLost(
            slot=slot, wal_status=SlotWalStatus.LOST.value, reason=reason, prevention=_PREVENTION
        )
    if sqlstate == _INSUFFICIENT_PRIVILEGE:
        return ConfigurationError(
            reason=f"{server}: {reason}. `pgcdc check` prints the SQL that grants what is missing."
        )
    if sqlstate.startswith(("08", "57P")) or sqlstate in CONFLICTS:
        # After a conflict of a standby's slot with the replay, the next start finds the slot lost.
        return ConnectionLost(server=server, doing="reading the stream", reason=reason)
    if sqlstate.startswith(("53", "40", "57")) or sqlstate == "55P03":
        return TransientError(
            reason=f"{server}: {reason} while reading slot {slot}. No change is lost; run it again."
        )
    change = _IN_CHANGE.search(error.context)
    if change is not None:
        # The server's sentence may contain a value: name its class only.
        return DefiniteError(
            reason=f"{server}: the server cannot print a row that was written at {change[1]} "
            f"(SQLSTATE {sqlstate}; the full message is in the server's log), so slot {slot} "
            "cannot pass this row, at any attempt. To continue after the row, "
            f"drop the slot (select pg_drop_replication_slot('{slot}')) and run "
            f"{renewal}, which takes new snapshots of all tables. A table whose rows cannot be "
            "printed stays without a snapshot until its rows are corrected; the others continue."
        )
    if sqlstate == _INTERNAL_ERROR and _UNMAPPED.match(message):
        return DefiniteError(
            reason=f"{server}: {reason} (SQLSTATE {sqlstate}). Slot {slot} cannot pass a prepared "
            "transaction that has truncated or rewritten a table, has changed the table in a "
            "subtransaction, and was rolled back (a defect of Postgres with two_phase). Set "
            "stream.two_phase to false, drop the slot (select "
            f"pg_drop_replication_slot('{slot}')), then begin a new epoch with {renewal}, which "
            "takes new snapshots of all tables."
        )
    if error.context:
        # An output plugin's error, of another callback: the sentence may contain a value as well.
        reason = "the output plugin failed; the full message is in the server's log"
    return DefiniteError(
        reason=f"{server}: {reason} (SQLSTATE {sqlstate}) while reading slot {slot}. "
        "No change is lost: the slot keeps the WAL. Correct the cause, then run it again."
    )


def _is_invalidated(error: ServerError) -> bool:
    """Return whether the server refuses a slot that it has invalidated."""
    return error.sqlstate == _NOT_IN_PREREQUISITE_STATE and (
        _INVALIDATED.search(error.message) is not None
        or error.function in _FUNCTIONS_OF_INVALIDATED
        or (error.function == _CREATE_CONTEXT and error.has_detail and not error.has_hint)
    )


def _has(message: str, name: str) -> bool:
    """Return whether a message of any language quotes a name, and not a longer one.

    Characters other than ASCII may be in the encoding of the database: any character matches them.
    """
    pattern = ".+".join(map(re.escape, re.split(r"[^\0-\x7f]+", name)))
    return re.search(rf"(?<!\w){pattern}(?!\w)", message) is not None
