"""The decision which tables need a snapshot, from plain values.

A re-snapshot resolves schema changes that the stream cannot replay. The tags of its run name the
newest event, so that attempts for different events are counted separately.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from pgcdc_assets.orchestration.partitions import group_neighbours
from pgcdc_assets.raw.relations.schema_events import SchemaEvent
from pgcdc_assets.tables.schema_gate import SchemaGate

TABLES_TAG = "pgcdc/tables"
EVENT_TAG = "pgcdc/schema_event"
REASON_TAG = "pgcdc/reason"

# The metadata of the tables has the whole reason.
_MAX_REASON = 400


@dataclass(frozen=True)
class SnapshotRequest:
    """Adjacent tables to snapshot in one run.

    Attributes:
        first, last: the partition keys of the first and the last table.
        event: the newest event that the snapshot heals; empty for first snapshots.
        reason: the reason of a re-snapshot; empty for first snapshots.
    """

    first: str
    last: str
    event: str = ""
    reason: str = ""

    @property
    def tags(self) -> dict[str, str]:
        """The tags by which the attempts are counted."""
        tables = {TABLES_TAG: f"{self.first}..{self.last}"}
        return {**tables, EVENT_TAG: self.event} if self.event else tables

    @property
    def reason_tags(self) -> dict[str, str]:
        """The tag that shows the reason of a re-snapshot."""
        if not self.reason:
            return {}
        cut = self.reason[: _MAX_REASON - 1] + "…"
        return {REASON_TAG: self.reason if len(self.reason) <= _MAX_REASON else cut}

    @property
    def key(self) -> str:
        """The tables and the event, as a part of run keys."""
        event = f":{self.event}" if self.event else ""
        return f"{self.first}:{self.last}{event}"


@dataclass(frozen=True)
class SnapshotNeeds:
    """The tables that have no snapshot or wait for a re-snapshot, according to the lake.

    Attributes:
        order: the partition keys of all tables, in order.
        missing: tables without a snapshot in the epoch.
        gates: tables with open schema events, by partition key.
    """

    order: Sequence[str]
    missing: Collection[str]
    gates: Mapping[str, SchemaGate] = field(default_factory=dict)

    def plan(self) -> list[SnapshotRequest]:
        """List the runs to request."""
        copies = [
            SnapshotRequest(first, last)
            for first, last in group_neighbours(self.order, list(self.missing))
        ]
        healed = {
            key: gate
            for key, gate in self.gates.items()
            if gate.heals and key in self.order and key not in self.missing
        }
        for first, last in group_neighbours(self.order, list(healed)):
            keys = self.order[self.order.index(first) : self.order.index(last) + 1]
            newest = max((healed[key].newest for key in keys), key=lambda event: event.position)
            reason = "; ".join(f"{key}: {healed[key].reason}" for key in keys)
            copies.append(SnapshotRequest(first, last, event_key(newest), reason))
        return copies


def event_key(event: SchemaEvent) -> str:
    """Return the position of an event as text."""
    return f"{event.epoch:04d}-{int(event.lsn):016X}"
