"""Counts of the rows that deletion vectors remove."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from pyspark.sql import SparkSession

from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.tables import deleted_rows as module
from pgcdc_assets.tables.deleted_rows import deleted_rows

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def path(embedded_session: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A table with files that have a deletion vector, a replaced one, or none."""
    path = str(tmp_path_factory.mktemp("table"))
    embedded_session.sql(
        f"CREATE TABLE delta.`{path}` (id BIGINT) USING delta "
        "TBLPROPERTIES ('delta.enableDeletionVectors' = 'true', 'delta.checkpointInterval' = '4')"
    )
    for first in (0, 100, 200):
        rows = embedded_session.range(first, first + 100).repartition(1)
        rows.write.format("delta").mode("append").save(path)
    for condition in ("id < 10", "id IN (50, 150, 151)", "id = 60", "id BETWEEN 70 AND 72"):
        embedded_session.sql(f"DELETE FROM delta.`{path}` WHERE {condition}").collect()
    return path


def counted(path: str, version: int | None = None) -> dict[str, int]:
    table = DeltaTable(path, version=version)
    return deleted_rows(Lake(path), path, table, pa.table(table.get_add_actions(flatten=True)))


@pytest.mark.parametrize("version", [0, 3, 4, 5, 7])
def test_the_counts_of_the_log_are_those_of_the_vectors(
    path: str, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_vectors = counted(path, version)
    monkeypatch.setattr(module, "SMALL_TABLE_ROWS", -1)
    of_log = counted(path, version)
    assert of_log == of_vectors
    assert sorted(of_log.values()) == {0: [], 3: [], 4: [10], 5: [2, 11], 7: [2, 15]}[version]


def test_a_large_table_is_counted_without_its_vectors(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = str(tmp_path / "copy")
    shutil.copytree(path, copy, ignore=shutil.ignore_patterns("*.bin"))
    assert (Path(copy) / "_delta_log" / "_last_checkpoint").exists()
    with pytest.raises(DeltaError):
        counted(copy)
    monkeypatch.setattr(module, "SMALL_TABLE_ROWS", -1)
    assert sum(counted(copy).values()) == 17


def test_a_checkpoint_of_another_form_is_left_to_delta_rs(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = str(tmp_path / "copy")
    shutil.copytree(path, copy)
    last = Path(copy) / "_delta_log" / "_last_checkpoint"
    last.write_text(json.dumps({**json.loads(last.read_text()), "parts": 2}))
    (Path(copy) / "_delta_log" / f".{last.name}.crc").unlink(missing_ok=True)
    monkeypatch.setattr(module, "SMALL_TABLE_ROWS", -1)
    # delta-rs lists the log, whatever the hint says.
    assert sum(counted(copy, 6).values()) == 14
