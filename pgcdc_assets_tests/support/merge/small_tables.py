"""The choice between the two ways in which small tables are merged."""

from __future__ import annotations

import pytest
from deltalake import DeltaTable

from pgcdc_assets.merge.batch import kept_rows, scope


def merge_by_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave every table to Spark."""
    monkeypatch.setenv(scope.SMALL_TABLES, scope.APART)


def merge_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge small tables together, without a Spark job each."""
    monkeypatch.delenv(scope.SMALL_TABLES, raising=False)


def forget_rows() -> None:
    """Forget the rows that this process has written, as if another process did the next merge."""
    kept_rows.KEPT_ROWS = kept_rows.KeptRows()


def merges_by_spark(path: str) -> int:
    """Count the commits of Spark in the log of a table."""
    return sum(e["engineInfo"].startswith("Apache-Spark") for e in DeltaTable(path).history())
