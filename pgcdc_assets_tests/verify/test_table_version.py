"""The description of a version of an SCD table."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from pgcdc_assets.raw.delta.log_entries import commit_path
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.table_name import TableName
from pgcdc_assets.tables.state import table_path
from pgcdc_assets.verify.table_version import read_table_version
from pgcdc_assets_tests.support.verify.empty_images import create_image


@pytest.mark.parametrize("prefix", ["file://{folder}/", "{folder}/", "../"])
def test_files_of_another_table_are_left_to_delta(tmp_path: Path, prefix: str) -> None:
    """A shallow clone that the owner of a table has restored."""
    zone, name = RawZone(Lake(str(tmp_path)), "test"), TableName("public", "t")
    create_image(zone, name, ("id",))
    path = table_path(zone.lake, zone.name, *name, 1)
    write_deltalake(path, pa.table({"id": pa.array([1], pa.int32())}), mode="append")
    found = read_table_version(zone, path, str(name), [])
    assert found.files is not None
    assert [Path(file).exists() for file in found.files] == [True]
    commit = Path(path, commit_path(1))
    actions = [json.loads(line) for line in commit.read_text().splitlines()]
    for action in actions:
        if "add" in action:
            action["add"]["path"] = prefix.format(folder=tmp_path) + action["add"]["path"]
    commit.write_text("\n".join(map(json.dumps, actions)))
    found = read_table_version(zone, path, str(name), [])
    assert (found.files, found.row_count) == (None, 1)
