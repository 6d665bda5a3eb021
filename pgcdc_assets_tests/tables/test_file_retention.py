"""For how long replaced files stay: of tables that were large, and by the owner's retention."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets.tables import vacuum
from pgcdc_assets.tables.maintenance import maintain_table
from pgcdc_assets.tables.properties import FILE_RETENTION
from pgcdc_assets.tables.vacuum import delete_replaced_files
from pgcdc_assets_tests.support.rewritten_table import data_files


@pytest.fixture
def path(lake: Lake) -> Path:
    """Return a table at version 10, with ten replaced files."""
    path = Path(lake.path("t"))
    for number in range(11):
        write(path, number)
    return path


def write(path: Path, number: int) -> None:
    write_deltalake(str(path), pa.table({"id": [number]}), mode="overwrite")


def delete(lake: Lake, path: Path, keep_hours: float) -> int:
    return delete_replaced_files(lake, str(path), keep_hours).deleted_files


def _at_large_then_truncated(path: Path, monkeypatch: pytest.MonkeyPatch) -> DeltaTable:
    """Write a large table and a small one, and return the large version, which a query reads."""
    monkeypatch.setattr(vacuum, "SMALL_TABLE_BYTES", 4_000)
    large = pa.table({"id": range(5_000)})
    write_deltalake(str(path), large)
    query = DeltaTable(str(path))
    assert sum(file.stat().st_size for file in path.glob("*.parquet")) > vacuum.SMALL_TABLE_BYTES
    write_deltalake(str(path), large.slice(0, 1), mode="overwrite")
    write_deltalake(str(path), large.slice(0, 2), mode="overwrite")
    return query


def _after_hours(monkeypatch: pytest.MonkeyPatch, hours: float) -> None:
    then = time.time() + hours * 3600 + 60
    monkeypatch.setattr(time, "time", lambda: then)


@pytest.mark.parametrize("looks_between", [False, True])
def test_the_files_of_a_large_table_stay_a_day_after_a_truncate(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, looks_between: bool
) -> None:
    """A query of the large version may take hours. The files of the small version stay an hour."""
    path = Path(lake.path("large"))
    query = _at_large_then_truncated(path, monkeypatch)
    if looks_between:
        assert delete(lake, path, 1) == 0
    with monkeypatch.context() as patched:
        _after_hours(patched, 1)
        assert delete(lake, path, 1) == 1
        assert query.to_pyarrow_table().num_rows == 5_000
        assert delete(lake, path, 1) == 0
    with monkeypatch.context() as patched:
        _after_hours(patched, 24)
        assert delete(lake, path, 1) == 1
    assert len(data_files(path)) == 1


def test_a_lost_commit_counts_as_one_of_a_large_table(
    lake: Lake, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    DeltaTable(str(path)).create_checkpoint()
    (path / "_delta_log" / f"{5:020d}.json").unlink()
    _after_hours(monkeypatch, 1)
    # The commits 6 to 10. The size of the table before commit 5 is not known.
    assert delete(lake, path, 1) == 5


def test_a_ledger_of_an_earlier_release_is_read(lake: Lake, path: Path) -> None:
    assert delete(lake, path, 1) == 0
    ledger = path / "_pgcdc" / "replaced_files.json"
    known = json.loads(ledger.read_text())
    known["files"] = [entry[:3] for entry in known["files"]]
    ledger.write_text(json.dumps(known))
    DeltaTable(str(path)).create_checkpoint()
    for entry in (path / "_delta_log").glob("*.json"):
        entry.unlink()
    assert delete(lake, path, 0) == 10


@pytest.mark.sampled
@pytest.mark.spark
def test_an_owners_retention_of_a_day_is_the_owners(
    lake: Lake, path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package sets a day too, but merges delete files within this day."""
    maintain_table(lambda: spark, lake, str(path), 1)
    write(path, 20)
    own = f"SET TBLPROPERTIES ('{FILE_RETENTION}' = 'interval 24 hours')"
    spark.sql(f"ALTER TABLE {delta_table(str(path))} {own}")
    maintain_table(lambda: spark, lake, str(path), 1)
    assert DeltaTable(str(path)).metadata().configuration[FILE_RETENTION] == "interval 24 hours"
    _after_hours(monkeypatch, 2)
    assert delete(lake, path, 1) == 0
