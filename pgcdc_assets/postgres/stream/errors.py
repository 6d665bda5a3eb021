"""What the server's refusals to stream mean for the reader."""

from __future__ import annotations

import re

from pgcdc_assets.errors import (
    ConfigurationError,
    ConnectionLost,
    DefiniteError,
    PgcdcError,
    SlotBusy,
    SlotLost,
    TransientError,
)

_OBJECT_IN_USE = "55006"
_UNDEFINED_OBJECT = "42704"
_NOT_IN_PREREQUISITE_STATE = "55000"
_UNDEFINED_FILE = "58P01"
_INSUFFICIENT_PRIVILEGE = "42501"


def stream_failure(
    server: str, slot: str, publication: str, sqlstate: str, message: str
) -> PgcdcError:
    """Sort an error of START_REPLICATION or of the running stream."""
    reason = message.rstrip(".")
    if sqlstate == _OBJECT_IN_USE:
        holder = re.search(r"PID (\d+)", message)
        return SlotBusy(
            slot=slot,
            active_pid=int(holder[1]) if holder else 0,
            application_name="another walsender",
        )
    if sqlstate == _UNDEFINED_OBJECT and "publication" in message:
        return DefiniteError(
            reason=f"{server}: {reason} as of the WAL that slot {slot} reads now: publication "
            f"{publication} was dropped for a while, or made after the slot. What it would have "
            "sent of that time is lost to this slot; nothing of it was confirmed. Begin a new "
            "epoch, with new copies of the tables, by pgcdc renew."
        )
    if sqlstate == _UNDEFINED_FILE or (
        sqlstate == _NOT_IN_PREREQUISITE_STATE and re.search(r"invalidated|can no longer", message)
    ):
        return SlotLost(slot=slot, wal_status="lost", reason=reason)
    if sqlstate == _INSUFFICIENT_PRIVILEGE:
        return ConfigurationError(
            reason=f"{server}: {reason}. `pgcdc check` prints the SQL that grants what is missing."
        )
    if sqlstate.startswith(("08", "57P")):
        return ConnectionLost(server=server, doing="reading the stream", reason=reason)
    if sqlstate.startswith(("53", "40", "57")) or sqlstate == "55P03":
        return TransientError(
            reason=f"{server}: {reason} while reading slot {slot}. Nothing un-landed was "
            "confirmed; run it again."
        )
    return DefiniteError(
        reason=f"{server}: {reason} (SQLSTATE {sqlstate}) while reading slot {slot}. Nothing "
        "un-landed was confirmed."
    )
