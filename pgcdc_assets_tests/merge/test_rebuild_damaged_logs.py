"""A rebuild of a table whose log cannot be read creates the table again, in one commit."""

from __future__ import annotations

import datetime as dt
import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import DeltaError
from pyspark.sql import SparkSession

from pgcdc_assets.errors import RawExpired, TableDamaged, TransientError
from pgcdc_assets.lsn import Position
from pgcdc_assets.merge import rebuild, replaced_table
from pgcdc_assets.merge.rebuild import rebuild_table
from pgcdc_assets.merge.replaced_table import create_again, describe_replaced
from pgcdc_assets.raw import table_files
from pgcdc_assets.raw.delta.log_entries import commit_path
from pgcdc_assets.raw.retention import remove_windows
from pgcdc_assets.raw.table_files import set_log_aside
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.tables.state import open_table, read_scd_state, read_watermark
from pgcdc_assets_tests.support.merge.history import (
    Landing,
    column,
    delete,
    insert,
    relation,
    update,
)
from pgcdc_assets_tests.support.merge.one_table import merge
from pgcdc_assets_tests.support.merge.small_tables import merge_by_spark, merge_together

pytestmark = pytest.mark.spark

_TARGET = CdcTable("shop", "items")
_HISTORY = CdcTable("shop", "items", (2,))


def land(zone: RawZone) -> Landing:
    """Land a snapshot and a window; Delta maps the names of the columns."""
    landing = Landing(zone, [relation(column("the id"), column("v", "text"), key=("the id",))])
    landing.begin([["1", "a"], ["2", "b"], ["3", "c"]])
    landing.land([update("1", "A"), delete("2", None)])
    return landing


def damage(path: str) -> None:
    """Cut off the newest entry of a log."""
    entry = max(Path(path, "_delta_log").glob("*.json"))
    text = entry.read_text()
    entry.write_text(text[: len(text) // 2])


def contents(spark: SparkSession, path: str) -> list[tuple[str, ...]]:
    frame = spark.read.format("delta").load(path)
    return sorted(tuple(map(str, row)) for row in frame.collect())


def description(path: str) -> dict[str, Any]:
    """Return what the log says about a table, without the names that Delta assigns."""
    table = DeltaTable(path)
    schema = json.loads(table.schema().to_json())
    for field in schema["fields"]:
        field["metadata"].pop("delta.columnMapping.physicalName", None)
    metadata, protocol = table.metadata(), table.protocol()
    return {
        "schema": schema,
        "properties": metadata.configuration,
        "partitions": metadata.partition_columns,
        "description": metadata.description,
        "protocol": (protocol.min_reader_version, set(protocol.reader_features or ())),
        "features": set(protocol.writer_features or ()),
    }


def test_a_log_is_set_aside_from_its_oldest_entry_on(
    zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a death in between, readers see no older version."""
    path = zone.lake.path(zone.name, "scd1", "shop", "t")
    Path(path).mkdir(parents=True)
    for number in range(11):
        write_deltalake(path, pa.table({"id": [number]}), mode="append")
    Path(path, commit_path(8)).unlink()
    store = table_files._store(zone)
    real, deleted = store.delete_file, list[str]()

    class Dying:
        """The lake's files, of which three can be deleted."""

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def delete_file(self, name: str) -> None:
            if len(deleted) == 3:
                raise InterruptedError
            deleted.append(name)
            real(name)

    monkeypatch.setattr(table_files, "_store", lambda _: Dying())
    with pytest.raises(InterruptedError):
        set_log_aside(zone, path)
    with pytest.raises(TableDamaged):
        open_table(zone.lake, path)


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EMFILE, "Too many open files"), DeltaError("Too many open files (os error 24)")],
)
def test_an_error_that_passes_does_not_replace_the_log(
    zone: RawZone, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    path = zone.lake.path(zone.name, "scd2", "shop", "items")
    Path(path).mkdir(parents=True)
    write_deltalake(path, pa.table({"id": [1]}))

    def fail(*_: object) -> NoReturn:
        raise error

    monkeypatch.setattr("pgcdc_assets.tables.state.open_delta_table", fail)
    with pytest.raises(TransientError, match="Too many open files"):
        describe_replaced(zone, _HISTORY, path)


@pytest.mark.sampled
def test_a_history_whose_first_changes_are_removed_is_not_replaced(
    spark: SparkSession, zone: RawZone
) -> None:
    """The versions before the removal are in the damaged table alone."""
    landing = Landing(zone, [relation(column("id"), column("v", "text"))])
    landing.begin([["1", "a"]])
    landing.land([update("1", "A")])
    landing.land([update("1", "B")])
    landing.copy([["1", "B"]])
    landing.land([insert("7", "g")])
    path = merge(spark, landing, _HISTORY).path
    remove_windows(zone, 1, landing.windows[1].end, landing.clock + dt.timedelta(days=1))
    damage(path)
    before = sorted(file.name for file in Path(path, "_delta_log").iterdir())
    with pytest.raises(RawExpired, match=r"[Mm]ove"):
        rebuild_table(spark, zone, _HISTORY, 2)
    assert sorted(file.name for file in Path(path, "_delta_log").iterdir()) == before


@pytest.mark.sampled
@pytest.mark.parametrize("target", [_TARGET, _HISTORY], ids=["scd1", "scd2"])
def test_the_table_is_as_before_and_merges_continue(
    spark: SparkSession, zone: RawZone, target: CdcTable
) -> None:
    landing = land(zone)
    path, scd = merge(spark, landing, target).path, target.scd[0]
    rows, described, mark = contents(spark, path), description(path), _watermark(zone, target)
    damage(path)
    with pytest.raises(TableDamaged):
        open_table(zone.lake, path)

    report = rebuild_table(spark, zone, target, scd)

    assert (report.watermark_before, report.row_count) == (None, len(rows))
    assert contents(spark, path) == rows
    assert description(path) == described
    assert _watermark(zone, target) == mark
    state = read_scd_state(zone.lake, zone.name, path)
    assert state is not None and state.is_watermark_recorded
    aside = [file.name for file in Path(path).iterdir() if "_damaged_" in file.name]
    assert any(name.endswith(f"_{0:020d}.json") for name in aside), aside
    landing.land([insert("4", "d"), update("3", "C")])
    assert merge(spark, landing, target).watermark_before == mark.lsn
    merged = contents(spark, path)
    rebuild_table(spark, zone, target, scd)
    assert contents(spark, path) == merged


@pytest.mark.sampled
@pytest.mark.parametrize("choose", [merge_by_spark, merge_together])
def test_a_merge_that_creates_the_table_meanwhile_is_kept(
    spark: SparkSession,
    zone: RawZone,
    monkeypatch: pytest.MonkeyPatch,
    choose: Callable[[pytest.MonkeyPatch], None],
) -> None:
    """A rebuild through an earlier LSN would lose its rows, with no conflict."""
    landing = land(zone)
    first = landing.windows[-1]
    path = merge(spark, landing, _TARGET).path
    landing.land([insert("4", "d")])
    damage(path)
    choose(monkeypatch)
    merged = []

    def set_aside(zone: RawZone, path: str) -> None:
        set_log_aside(zone, path)
        merged.append(merge(spark, landing, _TARGET))

    monkeypatch.setattr(replaced_table, "set_log_aside", set_aside)
    with pytest.raises(TransientError, match="Another process has created the Delta table"):
        rebuild_table(spark, zone, _TARGET, 1, first.end)
    assert [report.is_remade for report in merged] == [True]
    assert _watermark(zone, _TARGET) == landing.windows[-1].end_position
    assert [row[:2] for row in contents(spark, path)] == [("1", "A"), ("3", "c"), ("4", "d")]
    landing.land([delete("3", None)])
    merge(spark, landing, _TARGET)
    assert [row[:2] for row in contents(spark, path)] == [("1", "A"), ("4", "d")]


@pytest.mark.sampled
def test_a_log_that_another_process_has_repaired_stays(
    spark: SparkSession, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rebuilds at once: the second one finds the log of the first."""
    landing = land(zone)
    path = merge(spark, landing, _TARGET).path
    damage(path)
    others = [lambda: rebuild_table(spark, zone, _TARGET, 1)]

    def create(*given: Any) -> None:
        if others:
            others.pop()()
        create_again(*given)

    monkeypatch.setattr(rebuild, "create_again", create)
    with pytest.raises(TransientError, match="Another process has created the Delta table"):
        rebuild_table(spark, zone, _TARGET, 1)
    assert [row[:2] for row in contents(spark, path)] == [("1", "A"), ("3", "c")]


def _watermark(zone: RawZone, target: CdcTable) -> Position:
    found = read_watermark(zone.lake, zone.name, "shop", "items", target.scd[0])
    assert found is not None
    return found
