"""Writes in a table's log, beside commits of other programs."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from pgcdc_assets.lsn import Lsn, Position
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.tables.fence import Step, find_step, has_step_at

_APP, _AT = "pgcdc:test:fence", Position(1, Lsn(0x10))
_ROWS = pa.table({"id": [1]})


def commit(path: str, metadata: str | None, transactions: list[Transaction] | None = None) -> None:
    """Append a row with a text as `userMetadata`."""
    custom = None if metadata is None else {"userMetadata": metadata}
    properties = CommitProperties(custom_metadata=custom, app_transactions=transactions)
    write_deltalake(path, _ROWS, mode="append", commit_properties=properties)


@pytest.mark.parametrize(
    "metadata",
    [None, "", "nightly job", "1", "null", "[]", '"pgcdc"']
    + [json.dumps({"pgcdc": value}) for value in (1, None, "ab", [1], ["ab"], {"write": 1})],
)
def test_commits_of_other_programs_are_no_writes(metadata: str | None, lake: Lake) -> None:
    path, step = lake.path("t"), Step(_APP, 1, _AT)
    commit(path, step.metadata, [Transaction(_APP, 1)])
    commit(path, metadata)
    table = DeltaTable(path)
    assert find_step(lake, table, path, step) == step
    assert find_step(lake, table, path, Step(_APP, 1, _AT)) is None
    assert has_step_at(lake, table, path, _APP, _AT)


def test_metadata_that_is_no_text_is_of_another_program(lake: Lake) -> None:
    """delta-rs writes texts only; the log is a file that any program can write."""
    path, step = lake.path("t"), Step(_APP, 1, _AT)
    commit(path, step.metadata, [Transaction(_APP, 1)])
    commit(path, "marked")
    entry = Path(path, "_delta_log", f"{1:020d}.json")
    entry.write_text(entry.read_text().replace('"marked"', '{"pgcdc":{"epoch":1}}'))
    assert find_step(lake, DeltaTable(path), path, step) == step
