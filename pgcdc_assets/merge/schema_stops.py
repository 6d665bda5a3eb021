"""How schema events bound the steps of a merge.

A table does not pass an event whose change the stream cannot replay, until a snapshot has the
change. A table that keeps history ends a step at each such event, also if the snapshot is there:
the changes before the event can be folded, even if those between the event and the snapshot cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pgcdc_assets.lsn import Lsn, LsnWindow, Position
from pgcdc_assets.merge.plan import Plan
from pgcdc_assets.raw.schema_events import SchemaEvent
from pgcdc_assets.raw.snapshots import Snapshot
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.table_name import TableName
from pgcdc_assets.tables.schema_gate import SchemaGate, find_gates, hold_of, schema_change_error


@dataclass(frozen=True)
class SchemaStops:
    """The schema events of the tables of a merge.

    Attributes:
        through: the end of the merge.
        is_bounded: a rebuild or a comparison, which uses no snapshot above the end.
        gates: the tables with open events.
        unreached: the tables with open events, if the snapshots above the end do not count.
        holds: positions right before the events that need a snapshot, in order.
    """

    through: LsnWindow
    is_bounded: bool
    gates: Mapping[TableName, SchemaGate]
    unreached: Mapping[TableName, SchemaGate]
    holds: Mapping[TableName, Sequence[Position]]

    @classmethod
    def read(
        cls,
        zone: RawZone,
        targets: Sequence[CdcTable],
        snapshots: Sequence[Snapshot],
        through: LsnWindow,
        *,
        is_bounded: bool,
    ) -> SchemaStops:
        """Read the events of a lake."""
        events = zone.schema_events.read()
        reached = [s for s in snapshots if s.position <= through.end_position]
        unreached = find_gates(targets, events, reached)
        gates = unreached if is_bounded else find_gates(targets, events, snapshots)
        return cls(through, is_bounded, gates, unreached, _holds(events))

    def plan(
        self,
        target: CdcTable,
        scd: int,
        watermark: Position | None,
        plan: Callable[[LsnWindow], Plan],
    ) -> tuple[Plan, str]:
        """Plan a step that does not pass an event.

        Args:
            watermark: of the table; None before the first merge.
            plan: plans a step up to the end of a window.

        Returns:
            The plan, and the events that the table waits for, in sentences.

        Raises:
            SchemaChangeError: by the table's setting, a person takes the snapshot; or the fold of
                a rebuild or a comparison would pass the event.
        """
        name = target.name
        gate = self.gates.get(name)
        if gate is not None:
            error = gate.error(name, watermark, self.through.end_position)
            if error is not None:
                raise error
        if target.keeps_history(scd) and watermark is not None:
            # A snapshot is applied after all changes before the snapshot.
            gate = self.unreached.get(name)
        within = self._within(name, gate)
        found = plan(within)
        if target.keeps_history(scd):
            found = self._cut(name, found, plan)
        return found, "" if gate is None or within == self.through else gate.reason

    def _within(self, name: TableName, gate: SchemaGate | None) -> LsnWindow:
        """Return the window with the end of what the table may fold."""
        if gate is None or not gate.is_reached(self.through.end_position):
            return self.through
        if self.is_bounded:
            raise schema_change_error(name, gate.events[0])
        return self.through._replace(end=gate.hold.lsn)

    def _cut(self, name: TableName, found: Plan, plan: Callable[[LsnWindow], Plan]) -> Plan:
        """Return the plan of a shorter step, if an event is inside of the step."""
        for epoch, hold in self.holds.get(name, ()):
            if epoch == found.epoch and found.start < hold < found.end:
                return replace(plan(LsnWindow(epoch, Lsn(0), hold)), is_last=False)
        return found


def _holds(events: Sequence[SchemaEvent]) -> dict[TableName, list[Position]]:
    found: dict[TableName, list[Position]] = {}
    for event in events:
        if event.needs_snapshot:
            found.setdefault(event.table, []).append(hold_of(event))
    return {name: sorted(positions) for name, positions in found.items()}
