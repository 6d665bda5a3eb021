"""The Arrow file system of an S3 lake, with each call that the raw zone makes."""

from __future__ import annotations

import random

import pyarrow.fs as pafs
import pytest

from pgcdc_assets.raw import table_files
from pgcdc_assets.raw.delta.files import filesystem
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.table_files import move_files
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.support.object_store import StoreProxy


def test_objects_are_written_copied_listed_and_deleted(s3_lake: Lake) -> None:
    store = filesystem(s3_lake, s3_lake.path("shop"))
    with store.open_output_stream("t/a 1%.txt") as sink:
        sink.write(b"content")
    store.copy_file("t/a 1%.txt", "u/copied")
    with store.open_input_stream("u/copied") as source:
        assert source.read() == b"content"
    with store.open_input_file("u/copied") as source:
        assert source.read_at(3, 2) == b"nte"

    def files() -> list[str]:
        found = store.get_file_info(pafs.FileSelector("", recursive=True))
        return sorted(entry.path for entry in found if entry.is_file)

    assert files() == ["t/a 1%.txt", "u/copied"]
    store.delete_file("t/a 1%.txt")
    assert files() == ["u/copied"]


def test_the_store_itself_copies_the_files_of_a_rebuild(
    s3_lake: Lake, store_proxy: StoreProxy
) -> None:
    zone, names = RawZone(s3_lake, "shop"), ["a.parquet", "b.parquet"]
    staged, live = s3_lake.path("shop", "rebuild", "t"), s3_lake.path("shop", "scd1", "t")
    for name in names:
        with filesystem(s3_lake, staged).open_output_stream(name) as sink:
            sink.write(name.encode())
    store_proxy.forget()
    move_files(zone, dict.fromkeys(names, len("a.parquet")), staged, live)
    found = store_proxy.requests
    assert [each.key.rpartition("/")[2] for each in found if each.is_copy] == names
    assert not [each for each in found if each.kind == "GET" or not each.is_copy], found
    for name in names:
        with filesystem(s3_lake, live).open_input_stream(name) as source:
            assert source.read() == name.encode()


def test_a_file_that_the_store_cannot_copy_is_read_and_written(
    s3_lake: Lake, store_proxy: StoreProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3 refuses to copy an object of more than 5 GB."""
    monkeypatch.setattr(table_files, "LARGEST_COPY_BYTES", 20_000_000)
    monkeypatch.setattr(table_files, "_BLOCK_BYTES", 8_000_000)
    zone = RawZone(s3_lake, "shop")
    staged, live = s3_lake.path("shop", "rebuild", "t"), s3_lake.path("shop", "scd1", "t")
    sizes = {"small.parquet": 20_000_000, "_is_current=true/large.parquet": 20_000_001}
    contents = {name: random.randbytes(size) for name, size in sizes.items()}
    for name, content in contents.items():
        with filesystem(s3_lake, staged).open_output_stream(name) as sink:
            sink.write(content)
    store_proxy.forget()
    move_files(zone, sizes, staged, live)
    found = store_proxy.requests
    copied = {each.key.rpartition("/")[2] for each in found if each.is_copy}
    assert copied == {"small.parquet"}
    assert sum(each.kind == "PUT" and not each.is_copy for each in found) > 1, "parts"
    for name, content in contents.items():
        with filesystem(s3_lake, live).open_input_stream(name) as source:
            assert source.read() == content
