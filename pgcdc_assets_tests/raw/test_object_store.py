"""The Arrow file system of an S3 lake, with each call that the raw zone makes."""

from __future__ import annotations

import pyarrow.fs as pafs

from pgcdc_assets.raw.files import filesystem
from pgcdc_assets.raw.lake import Lake


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
