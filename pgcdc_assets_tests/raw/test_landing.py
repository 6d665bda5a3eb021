"""A window is landed once and completely, or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from pgcdc_assets.errors import (
    ConfigurationError,
    RawZoneError,
    TransientError,
    WindowUnavailable,
)
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.support.raw.rows import batch, change, landed, transaction, window


def data_files(zone: RawZone) -> list[str]:
    return [p.name for p in Path(zone.changes.table.uri).glob("*.parquet")]


def test_a_window_is_one_commit_with_the_application_transaction(zone: RawZone) -> None:
    report = zone.changes.land(window(100, 200), [transaction(100, 3), transaction(150, 2)])

    table = DeltaTable(zone.changes.table.uri)
    assert table.version() == 1
    assert table.transaction_version("pgcdc:test:1") == 200
    assert not report.already_landed
    assert report.summary.row_count == 5
    assert report.summary.transaction_count == 2
    assert report.summary.counts == {"shop.orders": {"I": 5}}
    assert (report.summary.first_commit_lsn, report.summary.last_commit_lsn) == (100, 150)
    assert zone.changes.captured_through(1) == Lsn(200)
    assert zone.changes.captured_through(2) is None


def test_a_window_without_rows_is_committed_too(zone: RawZone) -> None:
    zone.changes.land(window(100, 200), [])
    zone.changes.land(window(200, 300), [batch()])

    assert zone.changes.captured_through(1) == Lsn(300)
    assert [w.window for w in zone.changes.windows(1)] == [window(100, 200), window(200, 300)]
    assert zone.changes.summary(window(200, 300)).row_count == 0


def test_landing_a_window_again_reads_and_writes_nothing(zone: RawZone) -> None:
    first = zone.changes.land(window(100, 200), [transaction(100, 3)])

    def unread() -> Iterator[pa.RecordBatch]:
        raise AssertionError("the batches of a landed window are not read")
        yield

    again = zone.changes.land(window(100, 200), unread())

    assert again.already_landed
    assert again.summary == first.summary
    assert landed(zone) == [(100, 0), (100, 1), (100, 2)]


def test_an_error_among_the_batches_leaves_no_commit_and_no_file(zone: RawZone) -> None:
    def broken() -> Iterator[pa.RecordBatch]:
        yield transaction(100, 3)
        raise ConnectionError("the stream broke")

    with pytest.raises(ConnectionError):
        zone.changes.land(window(100, 200), broken())

    assert zone.changes.captured_through(1) is None
    assert landed(zone) == []
    assert data_files(zone) == []


def test_an_error_just_before_the_commit_leaves_no_commit_and_no_file(zone: RawZone) -> None:
    def lease_lost() -> None:
        assert len(data_files(zone)) == 1, "all files are written"
        raise TransientError(reason="the lease was lost")

    with pytest.raises(TransientError, match="lease was lost"):
        zone.changes.land(window(100, 200), [transaction(100, 3)], before_commit=lease_lost)

    assert zone.changes.captured_through(1) is None
    assert data_files(zone) == []


def test_a_window_that_leaves_a_gap_is_refused(zone: RawZone) -> None:
    zone.changes.land(window(100, 200), [])
    with pytest.raises(RawZoneError, match=r"from 0/C8 to 0/FA were not captured"):
        zone.changes.land(window(250, 300), [])


def test_a_window_that_overlaps_is_refused(zone: RawZone) -> None:
    zone.changes.land(window(100, 200), [])
    with pytest.raises(RawZoneError, match="overlaps the windows captured through 0/C8"):
        zone.changes.land(window(150, 300), [])


def test_a_row_of_another_window_is_refused(zone: RawZone) -> None:
    with pytest.raises(RawZoneError, match="0/C8 does not belong to window"):
        zone.changes.land(window(100, 200), [batch(change(150), change(200))])
    assert zone.changes.captured_through(1) is None


def test_each_epoch_has_its_own_windows(zone: RawZone) -> None:
    zone.changes.land(window(1000, 2000), [transaction(1000, 1)])
    zone.changes.land(window(50, 2000, epoch=2), [transaction(1000, 2)])

    assert zone.changes.captured_through(2) == Lsn(2000)
    assert zone.changes.summary(window(1000, 2000)).row_count == 1
    assert zone.changes.summary(window(50, 2000, epoch=2)).row_count == 2


def test_a_window_that_was_never_landed_has_no_summary(zone: RawZone) -> None:
    with pytest.raises(WindowUnavailable, match="was not landed"):
        zone.changes.summary(window(100, 200))
    zone.changes.land(window(100, 200), [])
    with pytest.raises(WindowUnavailable, match="no window with these borders"):
        zone.changes.summary(window(100, 150))


def test_a_landed_window_with_a_missing_file_is_reported_as_unavailable(zone: RawZone) -> None:
    zone.changes.land(window(100, 200), [transaction(100, 3)])
    Path(zone.changes.table.uri, *data_files(zone)).unlink()
    with pytest.raises(WindowUnavailable, match="a file of the window's rows is missing"):
        zone.changes.land(window(100, 200), [])


def test_a_landed_window_whose_rows_were_deleted_is_reported_as_unavailable(zone: RawZone) -> None:
    zone.changes.land(window(100, 200), [transaction(100, 3)])
    DeltaTable(zone.changes.table.uri).delete("ordinal = 1")
    with pytest.raises(WindowUnavailable, match="holds 2 of the 3 landed rows"):
        zone.changes.summary(window(100, 200))


def test_the_error_names_the_capture_of_another_raw_zone(lake: Lake) -> None:
    RawZone(lake, "shop").changes.land(window(100, 200), [])
    Path(lake.path("shop")).rename(lake.path("other"))
    with pytest.raises(RawZoneError, match=r"belongs to capture shop, not to other"):
        RawZone(lake, "other").changes.land(window(200, 300), [])


def test_the_error_names_a_folder_that_is_not_writable_and_the_remedy(tmp_path: Path) -> None:
    tmp_path.joinpath("file").touch()
    zone = RawZone(Lake(str(tmp_path / "file" / "lake")), "test")
    with pytest.raises(ConfigurationError, match=r"file/lake cannot be written .* PGCDC_LAKE"):
        zone.changes.land(window(100, 200), [])


def test_a_full_disk_ends_the_landing_without_a_commit(zone: RawZone) -> None:
    """H7, for the landing: a limit on file sizes simulates a full disk."""
    zone.changes.land(window(100, 200), [transaction(100, 1)])
    script = f"""
import random, resource
from pgcdc_assets.errors import TransientError
from pgcdc_assets_tests.support.raw.rows import *
from pgcdc_assets.raw.lake import Lake
zone = RawZone(Lake({zone.lake.uri!r}), "test")
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
rows = [batch(*(change(200, n, new=[random.randbytes(5000).hex()]) for n in range(200)))]
try:
    zone.changes.land(window(200, 300), rows)
except TransientError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "cannot be written" in done.stdout
    assert "Nothing was committed" in done.stdout
    assert zone.changes.captured_through(1) == Lsn(200)
    assert len(data_files(zone)) == 1


def test_the_error_of_a_refused_commit_has_the_cause(zone: RawZone) -> None:
    """H7: delta-rs names the cause on a later line."""
    zone.changes.land(window(100, 200), [transaction(100, 1)])
    script = f"""
import resource
from pgcdc_assets.errors import TransientError
from pgcdc_assets_tests.support.raw.rows import *
from pgcdc_assets.raw.lake import Lake
zone = RawZone(Lake({zone.lake.uri!r}), "test")
def fill():
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
try:
    zone.changes.land(window(200, 300), [transaction(200, 1)], before_commit=fill)
except TransientError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "raw/changes cannot be written: " in done.stdout
    assert ": File too large (os error 27). Nothing was committed. " in done.stdout
    assert zone.changes.captured_through(1) == Lsn(200)
    assert len(data_files(zone)) == 1


def test_files_of_a_killed_landing_are_ignored_and_vacuumed_later(zone: RawZone) -> None:
    """A2, for the landing: SIGKILL after the files are written, before the commit."""
    script = f"""
import os, signal
from pgcdc_assets_tests.support.raw.rows import *
from pgcdc_assets.raw.lake import Lake
zone = RawZone(Lake({zone.lake.uri!r}), "test")
zone.changes.land(window(100, 200), [transaction(100, 3)],
                  before_commit=lambda: os.kill(os.getpid(), signal.SIGKILL))
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == -9
    (orphan,) = data_files(zone)

    zone.changes.land(window(100, 200), [transaction(100, 3)])

    assert landed(zone) == [(100, 0), (100, 1), (100, 2)]
    long_ago = Path(zone.changes.table.uri, orphan).stat().st_mtime - 8 * 86_400
    os.utime(Path(zone.changes.table.uri, orphan), (long_ago, long_ago))
    removed = DeltaTable(zone.changes.table.uri).vacuum(dry_run=False, full=True)
    assert removed == [orphan]
    assert zone.changes.summary(window(100, 200)).row_count == 3


def test_each_row_group_of_a_large_window_has_one_source_table(zone: RawZone) -> None:
    import pyarrow.parquet as pq

    tables = [
        {"relation_id": 1, "table": "a", "new": ["x" * 4000]},
        {"relation_id": 2, "table": "b", "new": ["y" * 4000]},
    ]
    mixed = [change(100, n, **tables[n % 2]) for n in range(1000)]
    zone.changes.land(window(100, 200), [batch(*mixed[:500]), batch(*mixed[500:])])

    (name,) = data_files(zone)
    footer = pq.ParquetFile(Path(zone.changes.table.uri, name)).metadata
    column = [footer.schema.column(i).path for i in range(footer.num_columns)].index("table")
    statistics = [
        footer.row_group(g).column(column).statistics for g in range(footer.num_row_groups)
    ]
    assert [(s.min, s.max) for s in statistics] == [("a", "a"), ("b", "b")]
    assert landed(zone) == [(100, n) for n in range(1000)]
