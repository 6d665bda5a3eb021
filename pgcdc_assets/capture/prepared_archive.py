"""The prepared transactions that earlier landings of a session's epoch have stored."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from pgcdc_assets import failpoints
from pgcdc_assets.errors import ConfigurationError, PgcdcError, RawZoneError, renewal_command
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.postgres.prepared_transactions import read_prepared_transactions
from pgcdc_assets.postgres.slots.status import SlotStatus
from pgcdc_assets.postgres.stream.plugin_options import PluginOptions
from pgcdc_assets.postgres.wal.positions import read_current_lsn
from pgcdc_assets.protocol.prepared_transactions import PreparedTransaction
from pgcdc_assets.protocol.streaming_decoder import StreamingDecoder
from pgcdc_assets.raw.zone import RawZone

if TYPE_CHECKING:
    from pgcdc_assets.postgres.connection import Connection

_logger = logging.getLogger(__name__)

_SENDS_EACH_PREPARE = 180000


class StoredTransactions:
    """The stored prepared transactions of a stream. It implements `PreparedArchive`.

    The lease excludes other writers: the table is read once per stream.

    Args:
        zone: the raw zone.
        epoch: the epoch.
        captured_through: end of the newest landed window.
        server_version: `server_version_num`.
        is_standby: the server is a standby. A standby does not show which transactions are
            prepared, so the start of two_phase does not know those without changes.
    """

    def __init__(
        self,
        zone: RawZone,
        epoch: int,
        captured_through: Lsn,
        server_version: int,
        *,
        is_standby: bool = False,
    ) -> None:
        self._checks_unknown = server_version >= _SENDS_EACH_PREPARE and not is_standby
        self._zone = zone
        self._epoch = epoch
        self._captured_through = captured_through
        self._known: dict[tuple[int, str], PreparedTransaction] | None = None

    def find(self, xid: int, gid: str) -> PreparedTransaction | None:
        """Return the stored transaction that has not ended; None if there is none."""
        return self._read().get((xid, gid))

    def check_unknown(self, xid: int, gid: str, commit_lsn: Lsn) -> None:
        """Check that a transaction whose PREPARE was not sent has no rows.

        Before Postgres 18, the server sends no PREPARE of a transaction without changes, and no
        program can switch a slot to two_phase in a way that loses rows.

        Raises:
            RawZoneError: the rows of the transaction are missing.
        """
        if not self._checks_unknown:
            return
        known_from = self._zone.prepared.two_phase_from(self._epoch)
        if known_from is None or commit_lsn < known_from:
            return
        raise RawZoneError(
            raw_zone=self._zone.prepared.table.uri,
            reason=f"the prepared transaction {gid!r} (xid {xid}), committed at {commit_lsn}, was "
            "prepared before this capture read the slot, and the server does not send its rows "
            "again. Another program has read the slot, or has switched on its two_phase. "
            f"Run {renewal_command(self._zone.name)}, which takes new "
            "snapshots.",
        )

    def store(self, decoder: StreamingDecoder, window: LsnWindow) -> None:
        """Store what the server does not send again after the window, before its commit.

        Raises:
            TransientError: the lake cannot be written.
        """
        unfinished, ended = decoder.unfinished(), decoder.prepared.ended
        if not unfinished and not ended:
            return
        known = {each.key for each in self._read().values()}
        new = [each for each in unfinished if each.key not in known]
        if new or ended:
            self._zone.prepared.write(window.epoch, new, ended, window.end)

    def end_window(self, decoder: StreamingDecoder, window: LsnWindow) -> None:
        """Read stored rows from the lake from now on, and remove ended transactions from it.

        The window is landed. If the lake fails, a later removal or the maintenance removes them.
        """
        unfinished = decoder.unfinished()
        decoder.prepared.drop_stored(each.key for each in unfinished)
        if unfinished or decoder.prepared.ended:
            self._known = None
        self._captured_through = window.end
        if decoder.prepared.ended:
            try:
                self._zone.prepared.remove_ended(window.epoch, window.end)
            except PgcdcError as error:
                _logger.warning("Ended prepared transactions are removed later. %s", error)
            failpoints.reach(failpoints.AFTER_PREPARED_REMOVAL)

    def _read(self) -> dict[tuple[int, str], PreparedTransaction]:
        if self._known is None:
            stored = self._zone.prepared.unfinished(self._epoch, self._captured_through)
            self._known = {
                (each.key.xid, each.key.gid): each
                for each in sorted(stored, key=lambda each: each.key.lsn)
            }
        return self._known


def two_phase_options(
    conn: Connection, zone: RawZone, epoch: int, status: SlotStatus, options: PluginOptions
) -> PluginOptions:
    """Return the options of a stream, with `two_phase` if the slot has it or the settings ask.

    The slot gets `two_phase` at the first start of a stream with the option. The raw zone records
    this before, so a capture that was killed in between continues.

    Raises:
        ConfigurationError: another program has switched on the slot's two_phase.
    """
    if not status.two_phase and not options.two_phase:
        return options
    if zone.prepared.two_phase_from(epoch) is None:
        if status.two_phase:
            raise ConfigurationError(
                reason=f"Another program has switched on two_phase of replication slot "
                f"{status.slot}: rows of transactions that were prepared before may be missing. "
                f"Nothing was confirmed. Run {renewal_command(zone.name)}, which takes new "
                "snapshots."
            )
        begin_two_phase(conn, zone, epoch)
    return replace(options, two_phase=True)


def begin_two_phase(conn: Connection, zone: RawZone, epoch: int) -> None:
    """Record that the capture reads each PREPARE of an epoch from now on."""
    open_now = [(each.xid, each.gid) for each in read_prepared_transactions(conn)]
    # Read the LSN last: a transaction that is missing in the list was committed before, or is
    # prepared later than the start of the stream.
    lsn = read_current_lsn(conn)
    zone.prepared.begin(epoch, lsn, open_now)
    failpoints.reach(failpoints.AFTER_TWO_PHASE_RECORDED)


def adopt_two_phase(conn: Connection, zone: RawZone, status: SlotStatus) -> None:
    """Record that epoch 1 begins with a slot that has two_phase.

    Transactions that commit before this call are in the snapshots. For a transaction that is
    prepared now, the slot's reader may have confirmed the PREPARE already.

    Raises:
        ConfigurationError: transactions are prepared, and another program has read the slot.
    """
    open_now = read_prepared_transactions(conn)
    if open_now and status.was_read:
        gids = ", ".join(repr(each.gid) for each in open_now[:3])
        raise ConfigurationError(
            reason=f"Another program has read replication slot {status.slot} with two_phase, and "
            f"{len(open_now)} transactions are prepared now ({gids}): the server does not send "
            "them again. End them by commit prepared or rollback prepared, then run it again."
        )
    zone.prepared.begin(1, read_current_lsn(conn), ())
