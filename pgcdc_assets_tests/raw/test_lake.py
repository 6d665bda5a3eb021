"""Names of tables that differ only in case, on a file system that ignores case."""

from __future__ import annotations

from pathlib import Path

import pytest

from pgcdc_assets.cli.check import check_folders
from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.merge.build_tasks import build_tasks
from pgcdc_assets.merge.report import MergeFailure
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.table_name import TableName

NAMES = [TableName("public", "Orders"), TableName("public", "orders"), TableName("a", "orders")]


@pytest.fixture
def folding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a file system that ignores case: each spelling of an existing path exists."""

    def exists(path: Path) -> bool:
        return any(name.casefold() == path.name.casefold() for name in _names(path.parent))

    monkeypatch.setattr(Path, "exists", exists)
    monkeypatch.setattr(Path, "samefile", lambda path, other: True)


def _names(folder: Path) -> list[str]:
    return [each.name for each in folder.iterdir()] if folder.is_dir() else []


def test_a_file_system_that_distinguishes_case_has_both_tables(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path / "lake"))
    (tmp_path / "lake" / "c" / "scd1" / "public" / "Orders").mkdir(parents=True)
    assert not lake.ignores_case
    assert list(check_folders(lake, NAMES)) == []
    lake.check_folder("public.orders", lake.path("c", "scd1", "public", "orders"))
    assert not Lake("s3://bucket/lake").ignores_case


@pytest.mark.usefixtures("folding")
@pytest.mark.parametrize("twin", ["Orders", "ORDERS"])
def test_a_file_system_that_ignores_case_has_only_the_first_of_two_tables(
    tmp_path: Path, twin: str
) -> None:
    lake = Lake(str(tmp_path / "lake"))
    folder = tmp_path / "lake" / "c" / "scd1" / "public" / twin
    folder.mkdir(parents=True)
    assert lake.ignores_case
    (finding,) = check_folders(lake, NAMES)
    assert (finding.severity, finding.table) == ("error", "public.orders")
    assert "tables public.Orders and public.orders differ only in case" in finding.message
    for accepted in (("public", twin), ("public", "other"), ("new", "orders")):
        lake.check_folder("a table", lake.path("c", "scd1", *accepted))
    with pytest.raises(ConfigurationError, match=rf"Table public\.orders .*{twin} belongs to"):
        lake.check_folder("public.orders", lake.path("c", "scd1", "public", "orders"))
    with pytest.raises(ConfigurationError, match="belongs to"):
        lake.check_folder("Public.x", lake.path("c", "scd1", "Public", "x"))


@pytest.mark.usefixtures("folding")
def test_a_merge_refuses_the_table_before_it_reads_the_other_one(tmp_path: Path) -> None:
    zone = RawZone(Lake(str(tmp_path / "lake")), "c")
    (tmp_path / "lake" / "c" / "scd1" / "public" / "Orders").mkdir(parents=True)
    window = LsnWindow.of(1, 100, 200)
    failures = list(build_tasks(zone, [CdcTable("public", "orders")], window))
    assert len(failures) == 1
    assert isinstance(failures[0], MergeFailure)
    assert isinstance(failures[0].error, ConfigurationError)
