"""Everything about the tables to merge that can be known without Spark: state, plan and facts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pgcdc_assets.errors import ConfigurationError, PgcdcError
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.merge.facts import ChangeFacts, read_facts, versions_in_order
from pgcdc_assets.merge.planning import Plan, plan_merge
from pgcdc_assets.merge.report import MergeFailure, TableTarget
from pgcdc_assets.merge.watermark import TargetState, read_target, table_path
from pgcdc_assets.raw.relations import RelationVersion
from pgcdc_assets.raw.zone import RawZone

SCD_TYPES = (1,)


@dataclass(frozen=True)
class TableWork:
    """One SCD table with what was found out about it.

    Attributes:
        state: the table as its log describes it; None when it does not exist.
        relations: all relation versions of the plan's epoch.
        facts: about the changes to be folded; None when there are none.
        version_order: the relation versions of these changes in the order of their last use.
        started: monotonic clock.
    """

    plan: Plan
    scd: int
    path: str
    state: TargetState | None
    relations: tuple[RelationVersion, ...]
    started: float
    facts: ChangeFacts | None = None
    version_order: tuple[int, ...] = ()

    @property
    def name(self) -> tuple[str, str]:
        """Schema and table."""
        return self.plan.target.schema, self.plan.target.table

    @property
    def watermark_before(self) -> Lsn | None:
        """The table's watermark in the plan's epoch; None when it has none."""
        if self.state is None or self.state.watermark is None:
            return None
        epoch, lsn = self.state.watermark
        return lsn if epoch == self.plan.epoch else None

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to write."""
        return self.plan.copy is None and self.facts is None


@dataclass(frozen=True)
class _Place:
    target: TableTarget
    scd: int
    path: str
    state: TargetState | None
    started: float


def prepare(
    zone: RawZone, targets: Sequence[TableTarget], through: LsnWindow
) -> Iterator[TableWork | MergeFailure]:
    """Look at each table's state, plan its merge, and count its changes in one scan for all."""
    places = []
    for target in targets:
        for scd in target.scd:
            try:
                places.append(_place(zone, target, scd))
            except PgcdcError as error:
                yield MergeFailure(target.schema, target.table, error)
    copies = zone.snapshots.complete_copies()
    windows = zone.changes.windows(through.epoch, _lowest_watermark(places, through.epoch))
    relations: dict[int, tuple[RelationVersion, ...]] = {}
    works = []
    for place in places:
        watermark = place.state.watermark if place.state is not None else None
        try:
            plan = plan_merge(place.target, watermark, copies, windows, through)
        except PgcdcError as error:
            yield MergeFailure(place.target.schema, place.target.table, error)
            continue
        if plan.epoch not in relations:
            relations[plan.epoch] = tuple(zone.relations.versions(plan.epoch))
        works.append(
            TableWork(
                plan, place.scd, place.path, place.state, relations[plan.epoch], place.started
            )
        )
    yield from _with_facts(zone, works, through)


def _place(zone: RawZone, target: TableTarget, scd: int) -> _Place:
    started = time.monotonic()
    if scd not in SCD_TYPES:
        raise ConfigurationError(
            reason=f"Table {target.qualified_name}: there is no SCD type {scd} here, only "
            f"{', '.join(map(str, SCD_TYPES))}."
        )
    path = table_path(zone.lake, zone.name, target.schema, target.table, scd)
    return _Place(target, scd, path, read_target(zone.lake, zone.name, path), started)


def _lowest_watermark(places: Sequence[_Place], epoch: int) -> Lsn | None:
    """Say from where on windows matter; None when a table of the epoch starts from a copy."""
    lowest: Lsn | None = None
    for place in places:
        watermark = place.state.watermark if place.state is not None else None
        if watermark is None or watermark[0] != epoch:
            return None
        lowest = watermark[1] if lowest is None else min(lowest, watermark[1])
    return lowest


def _with_facts(
    zone: RawZone, works: Sequence[TableWork], through: LsnWindow
) -> Iterator[TableWork]:
    starts = {work.name: work.plan.first_change for work in works if work.plan.recorded_changes}
    facts: dict[tuple[str, str], ChangeFacts] = {}
    if starts:
        facts = read_facts(zone, through.epoch, starts, through.end)
    for work in works:
        found = facts.get(work.name)
        if found is None:
            yield work
            continue
        order = versions_in_order(zone, through, work.name, found, work.plan.first_change)
        yield replace(work, facts=found, version_order=tuple(order))
