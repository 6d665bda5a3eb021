"""Data files of tables without a log, on a local disk and in an object store."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pgcdc_assets.lsn import Lsn, Position
from pgcdc_assets.raw.delta.files import filesystem
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.tables.unlogged_files import holds_data_files, may_precede

_BEGIN = Position(2, Lsn(0x200))


@pytest.fixture(params=["local", "s3"])
def any_lake(request: pytest.FixtureRequest) -> Lake:
    """An empty lake."""
    lake: Lake = request.getfixturevalue("lake" if request.param == "local" else "s3_lake")
    return lake


def _write(lake: Lake, name: str, **columns: list[int]) -> str:
    """Write a data file, and return the folder of its table."""
    files = filesystem(lake, lake.uri)
    files.create_dir(f"t/{name}".rpartition("/")[0], recursive=True)
    with files.open_output_stream(f"t/{name}") as sink:
        pq.write_table(pa.table({f"_{key}": values for key, values in columns.items()}), sink)
    return lake.path("t")


@pytest.mark.parametrize(
    "epoch, lsn, precedes",
    [(2, 0x200, False), (2, 0x1FF, True), (1, 0x300, True), (3, 0x100, False)],
)
def test_the_versions_of_a_history_have_their_position(
    any_lake: Lake, epoch: int, lsn: int, precedes: bool
) -> None:
    assert not holds_data_files(any_lake, any_lake.path("t"))
    _write(any_lake, "_is_current=true/a.parquet", valid_from_lsn=[0x250], valid_from_epoch=[2])
    path = _write(
        any_lake, "_is_current=false/b.parquet", valid_from_lsn=[lsn], valid_from_epoch=[epoch]
    )
    assert holds_data_files(any_lake, path)
    assert may_precede(any_lake, path, 2, _BEGIN) == precedes


def test_rows_of_soft_deletes_have_a_position_in_the_first_epoch_only(any_lake: Lake) -> None:
    path = _write(any_lake, "a.parquet", lsn=[0x200])
    assert not may_precede(any_lake, path, 1, Position(1, Lsn(0x200)))
    assert may_precede(any_lake, path, 1, Position(1, Lsn(0x201)))
    assert may_precede(any_lake, path, 1, Position(2, Lsn(0x200)))


def test_an_unknown_file_may_precede_and_an_incomplete_file_does_not(any_lake: Lake) -> None:
    path = _write(any_lake, "a.parquet", lsn=[0x200])
    with filesystem(any_lake, path).open_output_stream("cut.parquet") as sink:
        sink.write(b"PAR1")
    assert not may_precede(any_lake, path, 1, Position(1, Lsn(0x200)))
    _write(any_lake, "b.parquet", id=[1])
    assert may_precede(any_lake, path, 1, Position(1, Lsn(0x200)))
