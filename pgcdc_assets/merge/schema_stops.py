"""Bounds of the steps of a merge, from schema events.

If the stream cannot replay the change of an event, the table stops at the event until a snapshot
has the change. A table that keeps history ends a step at each such event, also if the snapshot
exists: the changes before the event can be folded, even if those between the event and the snapshot
cannot. A table that needs a key ignores a snapshot without a key: the table stops before the event
that removed the key, until a snapshot has a key again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pgcdc_assets.errors import SnapshotNeeded
from pgcdc_assets.lsn import Lsn, LsnWindow, Position
from pgcdc_assets.merge.opened_table import OpenedTable
from pgcdc_assets.merge.plan import Plan, explain_end_of_epoch
from pgcdc_assets.protocol.relation import Relation
from pgcdc_assets.raw.relations.schema_events import MERGE, SchemaChange, SchemaEvent
from pgcdc_assets.raw.snapshots import Snapshot
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.table_name import TableName
from pgcdc_assets.tables.keyed_snapshots import (
    Relations,
    newest_without_key,
    no_key_error,
    snapshots_with_key,
)
from pgcdc_assets.tables.schema_gate import (
    SchemaGate,
    find_gates,
    gate_after,
    hold_of,
    schema_change_error,
)


@dataclass(frozen=True)
class SchemaStops:
    """The schema events of the tables of a merge.

    Attributes:
        through: the end of the merge.
        is_bounded: a rebuild or a comparison, which uses no snapshot above the end.
        gates: the tables with open events.
        unreached: the tables with open events, if the snapshots above the end do not count.
        keyed: the same, if the snapshots without a key do not count either.
        keyless: the relation of each table whose newest snapshot has no key, and that waits for no
            other snapshot.
        holds: positions right before the events that need a snapshot, in order.
        replaced: the events of tables whose name another table has.
        captured_through: returns the end of the landed windows of an epoch.
    """

    through: LsnWindow
    is_bounded: bool
    gates: Mapping[TableName, SchemaGate]
    unreached: Mapping[TableName, SchemaGate]
    keyed: Mapping[TableName, SchemaGate]
    keyless: Mapping[TableName, Relation]
    holds: Mapping[TableName, Sequence[Position]]
    replaced: Sequence[SchemaEvent]
    captured_through: Callable[[int], Lsn | None]

    @classmethod
    def read(
        cls,
        zone: RawZone,
        targets: Sequence[CdcTable],
        snapshots: Sequence[Snapshot],
        through: LsnWindow,
        relations: Relations,
        *,
        is_bounded: bool,
    ) -> SchemaStops:
        """Read the events of a lake.

        Args:
            relations: returns the relations of an epoch.
        """
        events = zone.schema_events.read()
        reached = [s for s in snapshots if s.position <= through.end_position]
        if is_bounded:
            snapshots = reached
        unreached = find_gates(targets, events, reached)
        gates = find_gates(targets, events, snapshots)
        # An event of a merge has the OID that was followed until then.
        replaced = [
            event
            for event in events
            if event.change is SchemaChange.TABLE_RECREATED and event.found_by != MERGE
        ]
        keyed, keyless = dict(unreached), {}
        for target in targets:
            if not any(map(target.needs_key, target.scd)):
                continue
            name, newest = target.name, newest_without_key(target, snapshots, relations)
            if newest is not None and name not in gates:
                keyless[name] = newest
            own = [event for event in events if event.table == name]
            if any(event.needs_snapshot for event in own):
                copied = snapshots_with_key(target, reached, relations)
                keyed |= find_gates([target], own, copied)
        return cls(
            through,
            is_bounded,
            gates,
            unreached,
            keyed,
            keyless,
            _holds(events),
            replaced,
            zone.changes.captured_through,
        )

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
            The plan, and the events or the snapshot that the table waits for, in sentences.

        Raises:
            SchemaChangeError: by the table's setting, a person takes the snapshot; or the fold of
                a rebuild or a comparison would pass the event.
            ReplicaIdentityError: the table needs a key, its newest snapshot has no key, and the
                changes before are folded.
        """
        name = target.name
        gate = gate_after(self.gates, name, watermark)
        if gate is not None:
            error = gate.error(name, self.through.end_position)
            if error is not None:
                raise error
        if gate is not None and self._is_final(gate, watermark):
            # Without a snapshot of a later epoch, as of a table that left the publication.
            within = LsnWindow(gate.hold.epoch, Lsn(0), gate.hold.lsn)
        else:
            if target.keeps_history(scd) and watermark is not None:
                # A snapshot is applied after all changes before the snapshot.
                gates = self.keyed if target.needs_key(scd) else self.unreached
                gate = gate_after(gates, name, watermark)
            within = self._within(name, gate)
        keyless = self.keyless.get(name) if target.needs_key(scd) else None
        try:
            found = plan(within)
        except SnapshotNeeded:
            if keyless is None:
                raise
            raise no_key_error(target, scd, keyless) from None
        if target.keeps_history(scd):
            found = self._cut(name, found, plan)
        is_stopped = gate is None or within != self.through
        if keyless is not None and watermark is not None and is_stopped:
            if gate is None or (found.partial is None and found.end <= found.start):
                raise no_key_error(target, scd, keyless)
            # The next step is this error.
            found = replace(found, is_last=False)
        if gate is not None and within != self.through:
            return found, gate.reason
        is_behind = found.epoch < self.through.epoch and found.is_last
        return found, self._explain_end(found) if is_behind else ""

    def awaits_snapshot(self, name: TableName, watermark: Position | None) -> str:
        """Return the open events whose snapshot is taken without a person, in sentences.

        Args:
            watermark: of the table; None before the first merge.
        """
        gate = gate_after(self.gates, name, watermark)
        return gate.reason if gate is not None and gate.heals and not self.is_bounded else ""

    def _explain_end(self, found: Plan) -> str:
        reason = explain_end_of_epoch(found.epoch, self.through.epoch)
        return f"{reason[0].upper()}{reason[1:]}."

    def is_replaced(self, table: OpenedTable, snapshots: Sequence[Snapshot]) -> bool:
        """Return whether the next changes follow an event that the table's relation was replaced.

        The relation may have kept its rows under another name: they are no rows of the declared
        table any more.
        """
        mark, known = table.watermark, table.relation_id
        if mark is None or known is None or not table.target.keeps_history(table.scd):
            return False
        applied = [s.position for s in snapshots if s.name == table.target.name]
        since = max((position for position in applied if position <= mark), default=mark)
        return any(
            event.table == table.target.name
            and event.epoch == mark.epoch
            and event.relation_id != known
            and since < event.position
            and hold_of(event) <= mark
            for event in self.replaced
        )

    def _is_final(self, gate: SchemaGate, watermark: Position | None) -> bool:
        """Return whether a merge of a later epoch would fold changes behind an open event.

        No snapshot of the later epoch has healed the event, and none may follow.
        """
        is_of_table = watermark is not None and watermark.epoch == gate.hold.epoch
        if self.is_bounded or not is_of_table or gate.hold.epoch >= self.through.epoch:
            return False
        captured = self.captured_through(gate.hold.epoch)
        return captured is not None and gate.is_reached(Position(gate.hold.epoch, captured))

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
