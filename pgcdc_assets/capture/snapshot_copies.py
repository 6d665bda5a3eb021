"""The copies of one run, of which some continue in a later snapshot of the server."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pgcdc_assets.capture.snapshot_pool import (
    SnapshotFailure,
    SnapshotPool,
    SnapshotReport,
    UnfinishedSnapshot,
)
from pgcdc_assets.errors import PgcdcError, SnapshotEnded, TableChanged, TransientError
from pgcdc_assets.postgres.catalog import PublishedTable
from pgcdc_assets.table_name import TableName

_logger = logging.getLogger(__name__)

# Number of attempts for a table that is altered during its copy.
_ATTEMPTS = 3


@dataclass
class Copies:
    """The copies of one run, over one or several snapshots of the server.

    Attributes:
        left: tables that need another snapshot: they were altered after the last one, or it ended
            before their last range.
    """

    left: list[TableName] = field(default_factory=list)
    _altered: Counter[TableName] = field(default_factory=Counter)
    _stalled: set[TableName] = field(default_factory=set)

    def of(
        self, pool: SnapshotPool, tables: Sequence[PublishedTable]
    ) -> Iterator[SnapshotReport | SnapshotFailure]:
        """Copy tables in one snapshot, and yield the results of those that need no other one."""
        self.left = []
        for outcome in pool.copy(tables):
            match outcome:
                case UnfinishedSnapshot():
                    if not outcome.has_progress and outcome.name in self._stalled:
                        yield SnapshotFailure(*outcome.name, self._incomplete(outcome))
                        continue
                    if not outcome.has_progress:
                        self._stalled.add(outcome.name)
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
                case _:
                    yield outcome

    def _incomplete(self, unfinished: UnfinishedSnapshot) -> PgcdcError:
        if unfinished.error is not None:
            error = SnapshotEnded(
                reason=f"The standby ended the snapshot twice before the copy of {unfinished.name} "
                "was complete, by a conflict with the replay of WAL, or the connection was lost. "
                "Set hot_standby_feedback = on on the standby, or raise its "
                "max_standby_streaming_delay, and run it again."
            )
            error.__cause__ = unfinished.error
            return error
        return TransientError(
            reason=f"Table {unfinished.name} was not complete within {unfinished.limit}, twice. A "
            "table without a key is copied in one snapshot of the server, and the ranges that "
            "earlier snapshots have read are brought up to date in one. Raise the limit, or "
            "snapshot.parallelism."
        )
