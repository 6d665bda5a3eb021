"""The merge of one SCD table, from its copy or its watermark on."""

from __future__ import annotations

import time
from dataclasses import dataclass

from pyspark.sql import DataFrame, SparkSession

from pgcdc_assets.errors import MergeConflict, RawZoneError, SchemaChangeError, TransientError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.merge import scd1
from pgcdc_assets.merge.events import Fold
from pgcdc_assets.merge.evolution import add_columns
from pgcdc_assets.merge.preparation import TableWork
from pgcdc_assets.merge.report import MergeReport
from pgcdc_assets.merge.shape import TableShape, build_shape
from pgcdc_assets.merge.sql import delta_table, string
from pgcdc_assets.merge.tuning import tune
from pgcdc_assets.merge.watermark import TargetState, advance_watermark, read_target
from pgcdc_assets.raw.reading import change_files
from pgcdc_assets.raw.relations import RelationVersion
from pgcdc_assets.raw.snapshots import Copy
from pgcdc_assets.raw.zone import RawZone

# How far the recorded watermark of a table without changes may fall behind: its next merge looks
# through the records of that many windows.
IDLE_WINDOWS = 10

# Given and not read from the files: Spark would open one before it plans the merge.
_RAW = (
    "epoch INT, commit_lsn BIGINT, ordinal BIGINT, commit_ts TIMESTAMP, op STRING, "
    "relation_id BIGINT, relation_version INT, schema STRING, table STRING, old_kind STRING, "
    "old ARRAY<STRING>, new ARRAY<STRING>, unchanged ARRAY<INT>"
)
_READ = "commit_lsn ordinal commit_ts op relation_version old_kind old new unchanged".split()


def pass_by(zone: RawZone, work: TableWork) -> MergeReport:
    """Report a table without changes; its watermark is recorded only now and then."""
    plan = work.plan
    if plan.end > plan.start and (plan.recorded_changes or len(plan.windows) >= IDLE_WINDOWS):
        advance_watermark(zone.lake, work.path, zone.app_id(plan.epoch), plan.end)
    return MergeReport(
        *work.name,
        work.scd,
        work.path,
        watermark_before=work.watermark_before,
        watermark_after=plan.end,
        windows_folded=len(plan.windows),
        row_count=work.state.row_count if work.state is not None else None,
        seconds=time.monotonic() - work.started,
    )


def merge_table(spark: SparkSession, zone: RawZone, work: TableWork) -> MergeReport:
    """Apply the copy, if one is due, and then the changes; at most one commit each.

    Args:
        spark: a session that nobody else uses meanwhile.

    Raises:
        DefiniteError: what the raw zone holds cannot be folded into this table.
        TransientError: another merge of the table was faster.
    """
    started = time.monotonic()
    plan, state = work.plan, work.state
    counts = _Counts()
    tune(spark, _rows_to_handle(work), state.size_bytes if state is not None else 0)
    if plan.copy is not None and not _is_made_by_its_changes(work):
        counts += _write_copy(spark, zone, work, plan.copy)
        state = _state(zone, work, plan.copy.snapshot_lsn)
    if work.facts is not None:
        counts += _fold(spark, zone, work, state)
        state = _state(zone, work, plan.end)
    elif plan.end > plan.start:
        advance_watermark(zone.lake, work.path, zone.app_id(plan.epoch), plan.end)
    assert state is not None
    return MergeReport(
        *work.name,
        work.scd,
        work.path,
        watermark_before=work.watermark_before,
        watermark_after=plan.end,
        windows_folded=len(plan.windows),
        changes_read=work.facts.change_count if work.facts is not None else 0,
        rows_inserted=counts.inserted,
        rows_updated=counts.updated,
        rows_deleted=counts.deleted,
        rows_rescued=_count_rescued(spark, work, state) if counts.may_be_rescued else 0,
        snapshot_lsn=plan.copy.snapshot_lsn if plan.copy is not None else None,
        row_count=state.row_count,
        seconds=time.monotonic() - started,
    )


def _rows_to_handle(work: TableWork) -> int:
    copied = work.plan.copy.row_count if work.plan.copy is not None else 0
    return copied + (work.facts.change_count if work.facts is not None else 0)


@dataclass(frozen=True)
class _Counts:
    """What was written."""

    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    may_be_rescued: bool = False

    def __add__(self, other: _Counts) -> _Counts:
        return _Counts(
            self.inserted + other.inserted,
            self.updated + other.updated,
            self.deleted + other.deleted,
            self.may_be_rescued or other.may_be_rescued,
        )


def _is_made_by_its_changes(work: TableWork) -> bool:
    """Say whether the copy is empty and rows follow: then one commit makes the table."""
    copy = work.plan.copy
    return copy is not None and copy.row_count == 0 and bool(work.version_order)


def _write_copy(spark: SparkSession, zone: RawZone, work: TableWork, copy: Copy) -> _Counts:
    shape = build_shape([_version_of_copy(work, copy)], work.plan.target.key)
    app_id = zone.app_id(work.plan.epoch)
    copied = _read_copy(spark, zone, copy)
    scd1.write_copy(work.path, copied, shape, app_id, copy.snapshot_lsn)
    return _Counts(copy.row_count, 0, _rows_in(work.state), shape.may_rescue)


def _fold(
    spark: SparkSession, zone: RawZone, work: TableWork, state: TargetState | None
) -> _Counts:
    plan, facts = work.plan, work.facts
    assert facts is not None
    app_id = zone.app_id(plan.epoch)
    before = _rows_in(state)
    if not work.version_order:
        # Nothing but TRUNCATE: the table keeps its shape and loses its rows.
        nothing = spark.read.format("delta").load(work.path).where("false")
        scd1.overwrite(nothing, work.path, app_id, plan.end)
        return _Counts(deleted=before)
    shape = _shape_of_changes(work, state)
    fold = Fold(shape, facts)
    changes = _read_changes(spark, zone, work)
    if _is_made_by_its_changes(work):
        rows = scd1.rows_alone(scd1.fold_changes(changes, fold, None), fold)
        scd1.create_or_replace(work.path, rows, shape, app_id, plan.end)
        return _Counts(_rows_after(zone, work), 0, before, shape.may_rescue)
    assert state is not None
    add_columns(spark, work.path, state.columns, shape)
    if state.is_empty or facts.truncates:
        rows = scd1.rows_alone(scd1.fold_changes(changes, fold, None), fold)
        scd1.replace_contents(work.path, rows, shape, app_id, plan.end)
        return _Counts(_rows_after(zone, work), 0, before, shape.may_rescue)
    stored = spark.read.format("delta").load(work.path)
    rows = scd1.fold_changes(changes, fold, stored)
    merged = scd1.merge_rows(spark, work.path, rows, fold, app_id, plan.end)
    return _Counts(*merged, shape.may_rescue)


def _rows_in(state: TargetState | None) -> int:
    return (state.row_count or 0) if state is not None else 0


def _rows_after(zone: RawZone, work: TableWork) -> int:
    return _rows_in(read_target(zone.lake, zone.name, work.path))


def _state(zone: RawZone, work: TableWork, watermark: Lsn) -> TargetState:
    """Read the table anew; its log must carry the watermark that was just written."""
    state = read_target(zone.lake, zone.name, work.path)
    if state is None or state.watermark is None or state.watermark < (work.plan.epoch, watermark):
        raise TransientError(
            reason=f"Table {work.plan.target.qualified_name} was not merged through {watermark}: "
            "its log does not carry that watermark. Run it again."
        )
    return state


def _version_of_copy(work: TableWork, copy: Copy) -> RelationVersion:
    candidates = [v for v in _relations(work) if v.version == copy.relation_version]
    # A table that was dropped and created again counts its versions anew.
    seen = [v for v in candidates if v.lsn <= copy.snapshot_lsn] or candidates
    if not seen:
        raise RawZoneError(
            raw_zone=work.path,
            reason=f"relation version {copy.relation_version} of "
            f"{work.plan.target.qualified_name} is not described in raw/relations.",
        )
    return max(seen, key=lambda v: v.lsn)


def _shape_of_changes(work: TableWork, state: TargetState | None) -> TableShape:
    """Build the shape from the version that the table was made with and those of the changes."""
    assert work.facts is not None
    name = work.plan.target.qualified_name
    known_key = None
    if _is_made_by_its_changes(work):
        assert work.plan.copy is not None
        copied = _version_of_copy(work, work.plan.copy)
        relation_id, made_with = copied.relation.relation_id, copied.version
    else:
        properties = state.properties if state is not None else {}
        if scd1.RELATION_ID not in properties:
            raise MergeConflict(
                table=name,
                reason=f"the Delta table {work.path} was not made by this package. Move it away",
            )
        relation_id = int(properties[scd1.RELATION_ID])
        made_with = int(properties[scd1.RELATION_VERSION])
        known_key = properties.get(scd1.KEY)
    if work.facts.relation_ids != {relation_id}:
        raise SchemaChangeError(
            relation=name, column="(all)", reason="the table was dropped and created again"
        )
    versions = {v.version: v for v in _relations(work) if v.relation.relation_id == relation_id}
    order = list(work.version_order)
    if made_with not in order:
        order.insert(0, made_with)
    missing = [number for number in order if number not in versions]
    if missing:
        raise RawZoneError(
            raw_zone=work.path,
            reason=f"relation version {missing[0]} of {name} is not described in raw/relations.",
        )
    ordered = [versions[number] for number in order]
    return build_shape(ordered, work.plan.target.key, known_key)


def _relations(work: TableWork) -> list[RelationVersion]:
    schema, table = work.name
    return [
        version
        for version in work.relations
        if (version.relation.schema, version.relation.table) == (schema, table)
    ]


def _read_copy(spark: SparkSession, zone: RawZone, copy: Copy) -> DataFrame:
    return (
        spark.read.format("delta")
        .load(zone.snapshots.table.uri)
        .where(
            f"epoch = {copy.epoch} AND snapshot_lsn = {int(copy.snapshot_lsn)} "
            f"AND schema = {string(copy.schema)} AND table = {string(copy.table)} "
            f"AND relation_version = {copy.relation_version}"
        )
        .select("new")
    )


def _read_changes(spark: SparkSession, zone: RawZone, work: TableWork) -> DataFrame:
    """Read the table's changes of the range that no TRUNCATE has undone.

    The files are named to Spark one by one. To let Delta find them costs three Spark jobs and about
    a second, which is more than a small merge.
    """
    plan, facts = work.plan, work.facts
    assert facts is not None
    (relation_id,) = facts.relation_ids
    after = f"commit_lsn >= {int(plan.first_change)}"
    if facts.truncates:
        lsn, ordinal = facts.truncates[-1].commit_lsn, facts.truncates[-1].ordinal
        after = (
            f"commit_lsn >= {lsn} AND (commit_lsn > {lsn} OR (commit_lsn = {lsn} "
            f"AND ordinal > {ordinal}))"
        )
    schema, table = work.name
    files = change_files(zone.changes.table, plan.epoch, plan.first_change, plan.end)
    return (
        spark.read.schema(_RAW)
        .parquet(*files)
        .where(
            f"epoch = {plan.epoch} AND {after} AND commit_lsn < {int(plan.end)} "
            f"AND relation_id = {relation_id} "
            f"AND schema = {string(schema)} AND table = {string(table)}"
        )
        .select(*_READ)
    )


def _count_rescued(spark: SparkSession, work: TableWork, state: TargetState) -> int:
    """Count the rows written by this merge that have a rescued value.

    Where the new files' statistics say that there is none, which is the rule, nothing is read.
    """
    known = work.state.rescued if work.state is not None else {}
    if not any(count != 0 for path, count in state.rescued.items() if path not in known):
        return 0
    row = spark.sql(
        f"SELECT count(*) AS n FROM {delta_table(work.path)} "
        f"WHERE _rescued IS NOT NULL AND _lsn >= {int(work.plan.start)}"
    ).collect()[0]
    return int(row["n"])
