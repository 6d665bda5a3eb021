"""Files that are written through delta-rs, as in an object store."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from deltalake.fs import DeltaStorageHandler

from pgcdc_assets.errors import TransientError
from pgcdc_assets.raw.delta import files
from pgcdc_assets.raw.delta.files import FileWriter
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets_tests.support.full_disk import full_disk


def test_a_writer_fills_and_marks_files_of_an_object_store(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A landing of more than an hour failed at its mark in an object store."""
    store = pafs.PyFileSystem(DeltaStorageHandler(str(tmp_path)))
    monkeypatch.setattr(files, "filesystem", lambda *_: store)
    monkeypatch.setattr(files, "push_to_disk", lambda _: None)
    monkeypatch.setattr(files, "_MARK_SECONDS", 0.0)
    group = pa.table({"v": [f"{n:_>40}" for n in range(100_000)]})
    with FileWriter(lake, str(tmp_path), group.schema, target_file_bytes=1_000_000) as writer:
        for _ in range(4):
            writer.write(group)
        written = writer.finish()
    assert sum(file.row_count for file in written) == 400_000
    found = [pq.read_table(tmp_path / file.path) for file in written]
    assert pa.concat_tables(found).equals(pa.concat_tables([group] * 4))
    assert len(list(tmp_path.glob("_writers/*"))) == 1


def test_a_file_that_does_not_reach_a_full_disk_is_removed(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system may notice it at the synchronisation. Each attempt left a file."""

    def fail(path: Path) -> None:
        assert path.exists()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "push_to_disk", fail)
    group = pa.table({"v": ["a"]})
    folder = tmp_path / "table"
    folder.mkdir()
    with (
        pytest.raises(TransientError, match="No space left"),
        FileWriter(lake, str(folder), group.schema) as writer,
    ):
        writer.write(group)
        writer.finish()
    assert list(folder.iterdir()) == []


def test_a_file_whose_first_bytes_do_not_fit_is_removed(lake: Lake, tmp_path: Path) -> None:
    """On a full disk, each attempt of a landing left an empty file."""
    group = pa.table({"v": ["a"]})
    with (
        full_disk(),
        pytest.raises(TransientError, match="File too large"),
        FileWriter(lake, str(tmp_path), group.schema) as writer,
    ):
        writer.write(group)
    assert list(tmp_path.iterdir()) == []
