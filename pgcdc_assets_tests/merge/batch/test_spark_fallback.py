"""Why Spark merges a small table: the reason that users see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
from deltalake import DeltaTable
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.merge import MergeFailure, MergeReport, merge_tables, rebuild_table
from pgcdc_assets.merge.batch import run, scope
from pgcdc_assets.merge.batch.casts import Casts
from pgcdc_assets.merge.batch.spark_fallback import NotInScope, reason_of
from pgcdc_assets.merge.build_tasks import build_tasks
from pgcdc_assets.merge.kinds.choose import choose_small_kind
from pgcdc_assets.protocol.relation import Column, Relation
from pgcdc_assets.raw.relations.schema_events import STREAM, SchemaChange, SchemaEvent
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.settings.policies import StepLimit
from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.support.merge.history import (
    Change,
    Landing,
    column,
    delete,
    insert,
    relation,
    truncate,
    update,
)
from pgcdc_assets_tests.support.merge.one_table import drop_epochs, merge
from pgcdc_assets_tests.support.merge.small_tables import merge_together, merges_by_spark

pytestmark = pytest.mark.spark

_COLUMNS = (column("id"), column("v", "text"))
_SECRET = "s3cret value"
_ITEMS = CdcTable("shop", "items")
_NOTES = replace(relation(*_COLUMNS), relation_id=4_711, table="notes")
_BOTH = [_ITEMS, CdcTable("shop", "notes")]


@dataclass(frozen=True)
class _Case:
    """A table that Spark merges.

    Attributes:
        phrase: a part of the reason.
        owner: what the table's owner does to it before the changes.
        bounds: the bounds of `scope` for the changes.
    """

    phrase: str
    changes: tuple[Change, ...] = (update("1", _SECRET), insert("3", _SECRET))
    relations: tuple[Relation, ...] = (relation(*_COLUMNS),)
    target: CdcTable = _ITEMS
    copied: tuple[tuple[str, str], ...] = (("1", _SECRET), ("2", "b"))
    owner: Callable[[SparkSession, str], object] = lambda _, path: path
    bounds: dict[str, int] = field(default_factory=dict)
    wal_bytes: int = 0
    is_copied_again: bool = False


def _alter(clause: str) -> Callable[[SparkSession, str], object]:
    return lambda spark, path: spark.sql(f"ALTER TABLE {delta_table(path)} {clause}")


def _set(name: str) -> Callable[[SparkSession, str], object]:
    return _alter(f"SET TBLPROPERTIES ('{name}' = 'true')")


def _partition(spark: SparkSession, path: str) -> None:
    rows = spark.read.format("delta").load(path)
    writer = rows.write.format("delta").mode("overwrite").partitionBy("v")
    writer.option("overwriteSchema", "true").save(path)


_HISTORY = CdcTable("shop", "items", scd=(2,))
_FULL = (relation(*_COLUMNS, identity="f"),)
_CASES = {
    "feature": _Case(
        "has Delta features: changeDataFeed", owner=_set("delta.enableChangeDataFeed")
    ),
    "constraint": _Case(
        "has Delta features: checkConstraints", owner=_alter("ADD CONSTRAINT few CHECK (id < 100)")
    ),
    "column mapping": _Case(
        "has Delta features: columnMapping",
        owner=_alter("SET TBLPROPERTIES ('delta.columnMapping.mode' = 'name')"),
    ),
    "append-only": _Case("is append-only", owner=_set("delta.appendOnly")),
    "column of the owner": _Case("columns of its owner", owner=_alter("ADD COLUMNS (mine STRING)")),
    "partitions": _Case("is partitioned by its owner", owner=_partition),
    "deletion vectors": _Case(
        "has deletion vectors",
        owner=lambda spark, path: spark.sql(f"DELETE FROM {delta_table(path)} WHERE id = 2"),
    ),
    "early release": _Case(
        "lacks system columns: _valid_from_epoch", target=_HISTORY, owner=drop_epochs
    ),
    "snapshot": _Case("has a new snapshot", is_copied_again=True),
    "changes": _Case("more than 1 changes", bounds={"MOST_CHANGES": 1}),
    "size of changes": _Case("its changes have more than", wal_bytes=2 * scope.MOST_CHANGE_BYTES),
    "size of the table": _Case("its files have more than 9 b", bounds={"MOST_TABLE_BYTES": 9}),
    "truncate": _Case("a TRUNCATE ends versions", (truncate(),), target=_HISTORY),
    "definition": _Case(
        "the definition has changed",
        (insert("3", _SECRET, version=2),),
        (relation(*_COLUMNS), relation(_COLUMNS[0], column("w", "text", attnum=2))),
    ),
    "no key": _Case("no key", relations=(relation(*_COLUMNS, key=(), identity="f"),)),
    "soft deletes": _Case("soft deletes", target=replace(_HISTORY, scd=(1,), soft_deletes=True)),
    "nullable key": _Case(
        "key of its settings may be NULL",
        relations=(relation(*_COLUMNS, key=(), identity="f"),),
        target=CdcTable("shop", "items", key=("id",)),
    ),
    "floating key": _Case(
        'equal values of the key "id" may have different texts',
        relations=(relation(column("id", "float8"), _COLUMNS[1]),),
    ),
    "whole old rows": _Case(
        "with whole old rows",
        (delete("2", "b", old_kind="O"),),
        relations=_FULL,
        target=_HISTORY,
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", _CASES)
def test_the_reason_names_what_is_unusual(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    merge_together(monkeypatch)
    case = _CASES[name]
    landing = Landing(zone, list(case.relations))
    landing.begin(case.copied)
    landing.land([])
    case.owner(spark, merge(spark, landing, case.target).path)
    landing.land(case.changes, wal_bytes=case.wal_bytes)
    if case.is_copied_again:
        landing.copy(case.copied)
        landing.land([])
    for bound, value in case.bounds.items():
        monkeypatch.setattr(scope, bound, value)
    (task,) = build_tasks(zone, [case.target], landing.windows[-1])
    assert not isinstance(task, MergeFailure), task.error
    with pytest.raises(NotInScope, match=case.phrase) as error:
        scope.find_small_merge(zone, task, partial(choose_small_kind, spark, zone))
    assert _SECRET not in error.value.reason


@pytest.mark.sampled
def test_the_report_of_several_steps_has_the_reason_and_another_merge_has_none(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge_together(monkeypatch)
    landing = _land_snapshot(zone)
    first = merge(spark, landing, _ITEMS)
    assert (first.spark_reason, merges_by_spark(first.path)) == ("", 0)
    DeltaTable(first.path).alter.set_table_properties({"delta.appendOnly": "false"})
    landing.land([update("1", "b")])
    assert merge(spark, landing, _ITEMS).spark_reason == ""
    landing.land([update("1", "c")])
    landing.land([update("1", "d")])
    spark.sql(f"ALTER TABLE {delta_table(first.path)} ADD COLUMNS (mine STRING)")
    limit = StepLimit(changes=1)
    (report,) = merge_tables(spark, zone, [_ITEMS], landing.windows[-1], limit=limit)
    assert isinstance(report, MergeReport)
    assert report.steps == 2
    assert (
        report.spark_reason == "the table has columns of its owner, a change feed or row tracking"
    )
    landing.land([])
    assert merge(spark, landing, _ITEMS).spark_reason == ""


@pytest.mark.sampled
def test_the_reason_after_an_error_has_its_kind_and_no_value(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge_together(monkeypatch)
    landing = _land_snapshot(zone)
    merge(spark, landing, _ITEMS)
    landing.land([update("1", "b")])

    def fail(*_: object) -> None:
        raise IndexError(_SECRET)

    monkeypatch.setattr(run, "fold_texts", fail)
    report = merge(spark, landing, _ITEMS)
    assert report.spark_reason == "the merge without Spark ended with IndexError"


@pytest.mark.sampled
@pytest.mark.parametrize(
    "columns",
    [(_COLUMNS[0], column("w", "text")), (*_COLUMNS, column("w", "text"))],
    ids=["renamed", "added"],
)
def test_a_column_of_the_owner_in_the_way_of_one_of_the_source_stops_its_table_only(
    spark: SparkSession,
    zone: RawZone,
    monkeypatch: pytest.MonkeyPatch,
    columns: tuple[Column, ...],
) -> None:
    """The values of the owner are not those of the source. A rebuild removes them."""
    merge_together(monkeypatch)
    landing = Landing(zone, [relation(*_COLUMNS), relation(*columns), _NOTES])
    landing.begin([["1", "a"]])
    landing.land([replace(insert("5", "e"), relation_id=_NOTES.relation_id)])
    paths = {each.table: each.path for each in _merge_both(spark, landing)}
    spark.sql(f"ALTER TABLE {delta_table(paths['items'])} ADD COLUMNS (w STRING)")
    added = replace(insert("6", "f"), relation_id=_NOTES.relation_id)
    landing.land([update("1", *"bc"[: len(columns) - 1], version=2), added])
    found = list(merge_tables(spark, zone, _BOTH, landing.windows[-1]))
    assert {each.table: type(each) for each in found} == {
        "items": MergeFailure,
        "notes": MergeReport,
    }
    rebuild_table(spark, zone, _ITEMS, 1)
    landing.land([update("1", *"de"[: len(columns) - 1], version=2)])
    path = merge(spark, landing, _ITEMS).path
    (row,) = spark.read.format("delta").load(path).select(*(c.name for c in columns)).collect()
    assert tuple(row) == (1, *"de"[: len(columns) - 1])


@pytest.mark.sampled
@pytest.mark.parametrize("error", [PySparkException("no answer"), ConnectionRefusedError()])
def test_a_table_is_left_once_if_its_fold_and_the_casts_of_the_others_fail(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    merge_together(monkeypatch)
    landing = _land_snapshot(zone, _NOTES)
    _merge_both(spark, landing)
    added = replace(insert("6", "f"), relation_id=_NOTES.relation_id)
    landing.land([delete("1", None), update("1", None, unchanged=(1,)), added])

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(Casts, "_project", fail)
    found = list(merge_tables(spark, zone, _BOTH, landing.windows[-1]))
    assert sorted(each.table for each in found) == ["items", "notes"]


@pytest.mark.sampled
def test_a_parked_row_is_no_version(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step from a parked row to the snapshot that heals its table has the parked row."""
    merge_together(monkeypatch)
    landing = Landing(zone, [relation(column("id", "text"), column("v", "text"))])
    landing.begin([["1", "a"]])
    landing.land([insert("2", "b")])
    target = CdcTable("shop", "items", scd=(2,))
    path = merge(spark, landing, target).path
    event = SchemaEvent(
        epoch=1,
        lsn=Lsn(landing.lsn),
        table=TableName("shop", "items"),
        relation_id=1000,
        change=SchemaChange.ROW_PARKED,
        columns=(),
        detail="1 row cannot be decoded",
        needs_snapshot=True,
        found_by=STREAM,
    )
    landing.land([Change("P", ("byte 12: no tuple", "\\x49000003e84e"))], [insert("3", "c")])
    zone.schema_events.record([event])
    assert merge(spark, landing, target).waits_for
    landing.copy([["1", "a"], ["2", "b"], ["3", "c"], ["4", "d"]])
    landing.land([insert("5", "e")])
    merge(spark, landing, target)
    rows = spark.read.format("delta").load(path).collect()
    assert sorted(row["id"] for row in rows) == ["1", "2", "3", "4", "5"]


def _land_snapshot(zone: RawZone, *further: Relation) -> Landing:
    """Land a snapshot of one row of the first table, and an empty window."""
    landing = Landing(zone, [relation(*_COLUMNS), *further])
    landing.begin([["1", "a"]])
    landing.land([])
    return landing


def _merge_both(spark: SparkSession, landing: Landing) -> list[MergeReport]:
    found = list(merge_tables(spark, landing.zone, _BOTH, landing.windows[-1]))
    reports = [each for each in found if isinstance(each, MergeReport)]
    assert len(reports) == len(found) == len(_BOTH)
    return reports


def test_an_error_of_the_rows_has_its_own_reason() -> None:
    assert reason_of(NotInScope("a key is NULL")) == "a key is NULL"
