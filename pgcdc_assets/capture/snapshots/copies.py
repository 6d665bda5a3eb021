"""The copies of one run, of which some continue in a later snapshot of the server."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field

from pgcdc_assets.capture.snapshots.pool import (
    Outcome,
    SnapshotFailure,
    SnapshotPool,
    SnapshotReport,
    UnfinishedSnapshot,
    describe_end,
)
from pgcdc_assets.errors import (
    ConnectionLost,
    PgcdcError,
    SnapshotEnded,
    TableChanged,
    TransientError,
)
from pgcdc_assets.postgres.catalog.relations import PublishedTable
from pgcdc_assets.table_name import TableName

_logger = logging.getLogger(__name__)

# Number of attempts for a table that is altered during its copy.
_ATTEMPTS = 3

# Numbers of snapshots of the server in which a table makes no progress.
_STALLED_BY_LIMIT = 2
_STALLED_BY_STANDBY = 3


@dataclass
class Copies:
    """The copies of one run, over one or several snapshots of the server.

    Attributes:
        left: tables that need another snapshot: they were altered after the last one, or it ended
            before their last range.
    """

    left: list[TableName] = field(default_factory=list)
    _altered: Counter[TableName] = field(default_factory=Counter)
    _stalled: Counter[TableName] = field(default_factory=Counter)

    def of(
        self, pool: SnapshotPool, tables: Sequence[PublishedTable]
    ) -> Iterator[SnapshotReport | SnapshotFailure]:
        """Copy tables in one snapshot, and yield the results of those that need no other one."""
        self.left = []
        for outcome in _outcomes(pool, tables):
            match outcome:
                case UnfinishedSnapshot():
                    self._stalled[outcome.name] += not outcome.has_progress
                    bound = _STALLED_BY_LIMIT if outcome.error is None else _STALLED_BY_STANDBY
                    if not outcome.has_progress and self._stalled[outcome.name] >= bound:
                        yield SnapshotFailure(*outcome.name, _incomplete(outcome))
                        continue
                    _logger.warning(
                        "The snapshot of the server %s %s. The copy of %s continues in a new one",
                        "has reached" if outcome.error is None else "was ended by",
                        outcome.limit,
                        outcome.name,
                    )
                    self.left.append(outcome.name)
                case SnapshotFailure(error=TableChanged() as error):
                    self._altered[outcome.name] += 1
                    if self._altered[outcome.name] == _ATTEMPTS:
                        yield outcome
                        continue
                    _logger.warning("%s Retrying with a new snapshot", error)
                    self.left.append(outcome.name)
                case SnapshotReport():
                    try:
                        pool.zone.complete_events(outcome.epoch, outcome.snapshot_lsn)
                    except PgcdcError as error:
                        yield SnapshotFailure(*outcome.name, error)
                        continue
                    yield outcome
                case _:
                    yield outcome


def _outcomes(
    pool: SnapshotPool, tables: Sequence[PublishedTable]
) -> Generator[Outcome, None, None]:
    """Yield the results of a pool. If its standby has ended the snapshot, no table is complete."""
    left = {table.declared_name for table in tables}
    try:
        with contextlib.closing(pool.copy(tables)) as outcomes:
            for outcome in outcomes:
                left.discard(outcome.name)
                yield outcome
    except (SnapshotEnded, ConnectionLost) as error:
        if pool.standby is None:
            raise
        limit = describe_end(error)
        yield from (UnfinishedSnapshot(name, False, limit, error) for name in sorted(left))


def _incomplete(unfinished: UnfinishedSnapshot) -> PgcdcError:
    error = unfinished.error
    if isinstance(error, SnapshotEnded):
        ended: PgcdcError = SnapshotEnded(
            reason=f"{_STALLED_BY_STANDBY} snapshots of the standby were ended by a conflict with "
            f"the replay of WAL, without progress of the copy of {unfinished.name}. Set "
            "hot_standby_feedback = on on the standby, or raise its max_standby_streaming_delay, "
            "and run it again."
        )
        ended.__cause__ = error
        return ended
    if error is not None:
        return error
    return TransientError(
        reason=f"Table {unfinished.name} was not complete within {unfinished.limit}, twice. A "
        "table without a key is copied in one snapshot of the server, and the ranges that "
        "earlier snapshots have read are brought up to date in one. Raise the limit, or "
        "snapshot.parallelism."
    )
