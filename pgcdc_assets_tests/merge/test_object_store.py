"""Merges of tables in an S3 store by Spark and by delta-rs, with faults of the store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable, QueryBuilder

from pgcdc_assets.raw.delta.files import filesystem, write_file
from pgcdc_assets.raw.delta.log_entries import commit_path
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings.storage import ACCESS_KEY, SECRET_KEY
from pgcdc_assets.tables.state import read_watermark, table_path
from pgcdc_assets_tests.support.merge.races import RACES
from pgcdc_assets_tests.support.merge.small_tables import merge_by_spark
from pgcdc_assets_tests.support.merge.store_merges import StoreMerges
from pgcdc_assets_tests.support.object_store import StoreProxy, check_commits
from pgcdc_assets_tests.support.object_store_proxy import Fault

# Spark merges a history; delta-rs commits a small current image.
KINDS = ("history", "current_image")

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.fixture
def store_zone(s3_lake: Lake) -> RawZone:
    return RawZone(Lake(s3_lake.uri, {"timeout": "5s", "retry_timeout": "10s"}), "test")


@pytest.fixture
def profile(store_proxy: StoreProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials in a profile of Amazon's tools only; no service of a machine is asked."""
    names = {"aws_access_key_id": ACCESS_KEY, "aws_secret_access_key": SECRET_KEY}
    lines = [f"{name} = {os.environ[variable]}\n" for name, variable in names.items()]
    file = tmp_path / "credentials"
    file.write_text(f"[lake]\n{''.join(lines)}")
    for variable in names.values():
        monkeypatch.delenv(variable)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", "lake")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def merges(
    store_zone: RawZone, monkeypatch: pytest.MonkeyPatch, kind: str
) -> Iterator[StoreMerges]:
    """Return merges of which Spark makes those of a history."""
    if kind == "history":
        merge_by_spark(monkeypatch)
    merges = StoreMerges(store_zone)
    yield merges
    merges.close()


def path_of(kind: str, zone: RawZone) -> str:
    """Return the URI of a race's table."""
    target = RACES[kind].target
    return table_path(zone.lake, zone.name, target.schema, target.table, target.scd[0])


def read_by_delta_rs(kind: str, zone: RawZone) -> list[tuple[Any, ...]]:
    """Return the rows of the compared columns as delta-rs reads them."""
    table = DeltaTable(path_of(kind, zone), storage_options=zone.lake.delta_options)
    found = QueryBuilder().register("t", table).execute(f"select {RACES[kind].columns} from t")
    columns = [column.to_pylist() for column in found.read_all().columns]
    return sorted(zip(*columns, strict=True))


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("profile")
def test_arrow_delta_rs_and_spark_find_the_credentials_of_a_profile(
    kind: str, store_zone: RawZone, merges: StoreMerges
) -> None:
    race = RACES[kind]
    landing = race.land_snapshot(store_zone)
    assert merges.merge(kind, landing.windows[-1]) == ""
    for changes in (race.first, race.second):
        assert merges.merge(kind, landing.land(changes)) == ""
    assert merges.contents(kind) == race.outcome
    assert read_by_delta_rs(kind, store_zone)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
def test_short_faults_lose_and_repeat_nothing_and_the_table_is_maintained(
    kind: str, store_zone: RawZone, merges: StoreMerges, store_proxy: StoreProxy
) -> None:
    race = RACES[kind]
    landing = race.land_snapshot(store_zone)
    assert merges.merge(kind, landing.windows[-1]) == ""
    busy = Fault("SlowDown", times=3, contains="/scd")
    slow = Fault("delay", times=3, contains="/scd", seconds=0.5)
    # The store applies the commit, and its answer is lost.
    lost = Fault("cut after", "PUT", contains="_delta_log/0", is_conditional=True, times=1)
    for changes in (race.first, race.second):
        window = landing.land(changes)
        with store_proxy.making(lost, busy, slow):
            assert merges.merge(kind, window) == ""
    assert store_proxy.faults() == {"cut after": 2, "SlowDown": 6, "delay": 6}
    assert merges.contents(kind) == race.outcome
    path = path_of(kind, store_zone)
    check_commits(
        store_proxy, store_zone.lake, path, "WRITE" if kind == "current_image" else "MERGE"
    )
    store_proxy.forget()
    merges.maintain(kind)
    assert merges.contents(kind) == race.outcome
    if kind == "history":
        check_commits(store_proxy, store_zone.lake, path, "OPTIMIZE")


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
def test_a_commit_that_is_answered_after_the_timeout_is_merged_once(
    kind: str, store_zone: RawZone, merges: StoreMerges, store_proxy: StoreProxy
) -> None:
    """The client asks again, and then the store gets the first request too."""
    race = RACES[kind]
    landing = race.land_snapshot(store_zone)
    assert merges.merge(kind, landing.windows[-1]) == ""
    late = Fault("delay", "PUT", "_delta_log/0", is_conditional=True, times=1, seconds=20)
    for changes in (race.first, race.second):
        window = landing.land(changes)
        store_proxy.forget()
        with store_proxy.making(late):
            error = merges.merge(kind, window)
            assert not error or error.startswith("TransientError: ")
            assert not error or merges.merge(kind, window) == ""
        commits = [each for each in store_proxy.requests if each.is_conditional]
        assert len(commits) > 1 and store_proxy.faults() == {"delay": 1}
    assert merges.contents(kind) == race.outcome


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["SlowDown", "cut", "ExpiredToken"])
def test_a_merge_without_the_store_writes_nothing_and_is_repeated(
    what: str, kind: str, store_zone: RawZone, merges: StoreMerges, store_proxy: StoreProxy
) -> None:
    race = RACES[kind]
    target = race.target
    landing = race.land_snapshot(store_zone)
    assert merges.merge(kind, landing.windows[-1]) == ""
    before = merges.contents(kind)
    window = landing.land(race.first)
    with store_proxy.making(Fault(what, "PUT", contains="/scd")):
        error = merges.merge(kind, window)
    if what == "ExpiredToken":
        assert error.startswith("ConfigurationError: The object store refused access to ")
        assert "(ExpiredToken). Check the credentials in the environment, their expiry" in error
    else:
        assert error.startswith("TransientError: ")
    assert merges.contents(kind) == before
    names = target.schema, target.table, target.scd[0]
    assert read_watermark(store_zone.lake, "test", *names) == landing.windows[0].end_position
    assert merges.merge(kind, window) == ""
    assert merges.merge(kind, landing.land(race.second)) == ""
    assert merges.contents(kind) == race.outcome


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
def test_a_rebuild_without_the_store_leaves_the_table_and_is_repeated(
    kind: str, store_zone: RawZone, merges: StoreMerges, store_proxy: StoreProxy
) -> None:
    """H7: while files are built, while they are moved, and at the commit."""
    race = RACES[kind]
    landing = race.land_snapshot(store_zone)
    for changes in (race.first, race.second):
        assert merges.merge(kind, landing.land(changes)) == ""
    assert merges.contents(kind) == race.outcome
    live = path_of(kind, store_zone).removeprefix("s3://lake/")
    for what, part, error in (
        ("ExpiredToken", "/rebuild/", "ConfigurationError: "),
        ("SlowDown", f"{live}/", "TransientError: "),
        ("SlowDown", f"{live}/_delta_log/0", "TransientError: "),
    ):
        store_proxy.forget()
        with store_proxy.making(Fault(what, "PUT", contains=part)):
            assert merges.rebuild(kind).startswith(error), part
        assert store_proxy.faults()[what] > 0
        assert merges.contents(kind) == race.outcome
    assert merges.rebuild(kind) == ""
    assert merges.contents(kind) == race.outcome
    assert merges.merge(kind, landing.land([])) == ""
    assert merges.contents(kind) == race.outcome


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
def test_a_rebuild_whose_answer_is_lost_is_committed_once(
    kind: str, store_zone: RawZone, merges: StoreMerges, store_proxy: StoreProxy
) -> None:
    """A second commit of the same files would remove them for Spark."""
    race = RACES[kind]
    landing = race.land_snapshot(store_zone)
    for changes in (race.first, race.second):
        assert merges.merge(kind, landing.land(changes)) == ""
    path = path_of(kind, store_zone)
    entry = f"{path.removeprefix('s3://lake/')}/_delta_log/0"
    for what in ("SlowDown after", "cut after"):
        before = DeltaTable(path, storage_options=store_zone.lake.delta_options).version()
        store_proxy.forget()
        with store_proxy.making(Fault(what, "PUT", entry, is_conditional=True, times=1)):
            assert merges.rebuild(kind) == ""
        assert store_proxy.faults() == {what: 1}
        assert merges.contents(kind) == race.outcome, what
        assert read_by_delta_rs(kind, store_zone) == race.outcome, what
        table = DeltaTable(path, storage_options=store_zone.lake.delta_options)
        assert table.version() == before + 1
    assert merges.merge(kind, landing.land([])) == ""
    assert merges.contents(kind) == race.outcome


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["history"])
def test_a_damaged_log_is_replaced_by_one_conditional_commit(
    kind: str, store_zone: RawZone, merges: StoreMerges, store_proxy: StoreProxy
) -> None:
    race = RACES[kind]
    landing = race.land_snapshot(store_zone)
    for changes in (race.first, race.second):
        assert merges.merge(kind, landing.land(changes)) == ""
    path = path_of(kind, store_zone)
    version = DeltaTable(path, storage_options=store_zone.lake.delta_options).version()
    write_file(filesystem(store_zone.lake, path), commit_path(version), b'{"add":{"path":')
    store_proxy.forget()
    first = f"{path.removeprefix('s3://lake/')}/{commit_path(0)}"
    with store_proxy.making(Fault("SlowDown after", "PUT", first, is_conditional=True, times=1)):
        assert merges.rebuild(kind) == ""
    puts = [each for each in store_proxy.requests if (each.kind, each.key) == ("PUT", first)]
    assert len(puts) > 1 and all(each.is_conditional for each in puts)
    assert merges.contents(kind) == read_by_delta_rs(kind, store_zone) == race.outcome
    assert merges.merge(kind, landing.land([])) == ""
    assert merges.contents(kind) == race.outcome
