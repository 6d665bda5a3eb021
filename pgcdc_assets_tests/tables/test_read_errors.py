"""Errors of reading an SCD table that is not damaged."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.raw.delta_log import FOLDER, commit_path
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.tables.state import open_table
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
