"""Addresses of lakes, and names of tables that differ only in case."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pgcdc_assets.cli.check import examine_folders
from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.merge.build_tasks import build_tasks
from pgcdc_assets.merge.report import MergeFailure
from pgcdc_assets.orchestration.resources import LakeResource
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.settings.storage import check_lake_uri
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
    assert list(examine_folders(lake, NAMES)) == []
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
    (finding,) = examine_folders(lake, NAMES)
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


_NO_SLASHES = "begins like a URI, but is none of a lake. Write the address as "
_NO_BUCKET = "does not name the bucket of its object store. Write the address as "
_OF_AZURE = "://CONTAINER@ACCOUNT.dfs.core.windows.net/FOLDER"


@pytest.mark.parametrize(
    ("uri", "problem"),
    [
        ("s3:/bucket/lake", f"{_NO_SLASHES}s3://BUCKET/FOLDER"),
        ("S3:bucket/lake", f"{_NO_SLASHES}s3://BUCKET/FOLDER"),
        ("s3a:/bucket/lake", f"{_NO_SLASHES}s3a://BUCKET/FOLDER"),
        ("gs:/bucket/lake", f"{_NO_SLASHES}gs://BUCKET/FOLDER"),
        ("abfss:/container@account/lake", f"{_NO_SLASHES}abfss{_OF_AZURE}"),
        ("dbfs:/mnt/lake", f"{_NO_SLASHES}s3://BUCKET/FOLDER"),
        ("a.b:c/lake", f"{_NO_SLASHES}s3://BUCKET/FOLDER, or the path of a folder, such as ./a:b"),
        ("file:lake", f"{_NO_SLASHES}file:///FOLDER"),
        ("file://host/lake", f"{_NO_SLASHES}file:///FOLDER"),
        ("s3://", f"{_NO_BUCKET}s3://BUCKET/FOLDER"),
        ("s3:///lake", f"{_NO_BUCKET}s3://BUCKET/FOLDER"),
        ("abfs:///lake", f"{_NO_BUCKET}abfs{_OF_AZURE}"),
        ("hdfs://", f"{_NO_BUCKET}s3://BUCKET/FOLDER"),
    ],
)
def test_an_incomplete_uri_is_not_a_folder_below_the_current_one(
    uri: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    calls: list[tuple[str, Callable[[], object]]] = [
        ("The lake", lambda: Lake(uri).check_writable()),
        ("lake", lambda: LakeResource(uri=uri).lake().check_writable()),
        ("--lake", lambda: check_lake_uri(uri, "--lake")),
    ]
    for setting, call in calls:
        with pytest.raises(ConfigurationError) as caught:
            call()
        assert str(caught.value).startswith(f"{setting} {problem}")
    monkeypatch.setenv("PGCDC_LAKE", uri)
    with pytest.raises(ConfigurationError, match=r"^PGCDC_LAKE "):
        Lake.from_environment("default")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("file:///data/lake", "/data/lake"),
        ("file:/data/lake", "/data/lake"),
        ("file:////data/lake", "/data/lake"),
        ("FILE:/data/lake", "/data/lake"),
        ("/data/a:b", "/data/a:b"),
        ("./a:b/lake", "{here}/a:b/lake"),
        ("lakes/s3:x", "{here}/lakes/s3:x"),
        ("c:lake", "{here}/c:lake"),
        ("s3://bucket", "s3://bucket"),
        ("S3A://bucket/a:b/", "S3A://bucket/a:b"),
        ("hdfs:///lake", "hdfs:///lake"),
    ],
)
def test_an_address_of_a_lake_is_a_folder_or_a_complete_uri(
    uri: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Lake(uri).uri == path.format(here=tmp_path)
    check_lake_uri(uri, "lake")


@pytest.mark.parametrize(
    ("written", "expected"),
    [("current/../lake", "releases/lake"), ("plain/../lake", "lake"), ("current/lake", None)],
)
def test_the_parent_of_a_link_is_that_of_its_target(
    tmp_path: Path, written: str, expected: str | None
) -> None:
    """Hadoop would remove `current/..`, so Spark would write into another folder than delta-rs."""
    (tmp_path / "releases" / "42").mkdir(parents=True)
    (tmp_path / "current").symlink_to(tmp_path / "releases" / "42")
    assert Lake(f"{tmp_path}/{written}").uri == f"{tmp_path}/{expected or written}"
