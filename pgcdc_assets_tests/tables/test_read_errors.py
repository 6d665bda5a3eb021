"""Errors of reading an SCD table that is not damaged."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.raw.delta.log_entries import FOLDER, commit_path
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.tables.state import open_table, read_scd_state
from pgcdc_assets_tests.support.access import without_access


@pytest.mark.parametrize("part", [commit_path(0), FOLDER, ""])
def test_a_table_that_this_user_may_not_read_is_not_called_damaged(part: str) -> None:
    """A backup was restored by another user. A rebuild would not help."""
    with tempfile.TemporaryDirectory(prefix="pgcdc-test-") as folder:
        Path(folder).chmod(0o755)
        path = Path(folder, "orders")
        write_deltalake(path, pa.table({"id": [1]}))
        with (
            without_access(path / part),
            pytest.raises(ConfigurationError, match=r"orders cannot be read: Permission denied"),
        ):
            open_table(Lake(folder), str(path))
        assert open_table(Lake(folder), str(path)) is not None


def test_a_feature_that_delta_rs_cannot_read_is_named_with_the_remedy(lake: Lake) -> None:
    """The counts of deleted rows are neither in the log nor read. A rebuild keeps the features."""
    path = lake.path("orders")
    write_deltalake(path, pa.table({"id": [1]}))
    entry = Path(path, commit_path(0))
    actions = [json.loads(line) for line in entry.read_text().splitlines()]
    names = ["deletionVectors", "typeWidening", "v2Checkpoint"]
    features = {"readerFeatures": names, "writerFeatures": names}
    for action in actions:
        if "protocol" in action:
            action["protocol"] = {"minReaderVersion": 3, "minWriterVersion": 7, **features}
    entry.write_text("\n".join(map(json.dumps, actions)))
    with pytest.raises(ConfigurationError, match=r"orders has features .*TypeWidening") as raised:
        read_scd_state(lake, "shop", path)
    assert "DROP FEATURE" in str(raised.value)
