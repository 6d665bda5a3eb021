"""Captures into a lake in an S3 store, with faults of the store."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest

from pgcdc_assets.capture.snapshots.pool import SnapshotReport
from pgcdc_assets.capture.snapshots.run import snapshot_tables
from pgcdc_assets.errors import PgcdcError, TransientError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.support.captures import NAME, Capturing
from pgcdc_assets_tests.support.handover import copied_rows
from pgcdc_assets_tests.support.object_store import StoreProxy
from pgcdc_assets_tests.support.object_store_proxy import Fault
from pgcdc_assets_tests.support.raw.rows import relation
from pgcdc_assets_tests.support.waits import wait_until

IMPATIENT = {"max_retries": "2", "retry_timeout": "5s"}


def _at_commit(what: str) -> Fault:
    return Fault(what, kind="PUT", contains="_delta_log/000", is_conditional=True, times=1)


@pytest.fixture
def stored(capturing: Capturing, s3_lake: Lake) -> Capturing:
    """A capture into the S3 store, whose delta-rs gives up soon."""
    zone = RawZone(Lake(s3_lake.uri, IMPATIENT), NAME)
    return dataclasses.replace(capturing, zone=zone)


@pytest.mark.sampled
def test_windows_are_captured_into_the_store(stored: Capturing, store_proxy: StoreProxy) -> None:
    window = stored.begin_with_one_insert()
    stored.capture(window)
    stored.database.execute("insert into t select generate_series(2, 1000)")
    stored.capture()
    assert stored.texts("t") == [[str(i)] for i in range(1, 1001)]
    stored.capture(window)
    assert len(stored.rows()) == 1000, "a landed window is not landed twice"
    assert stored.confirmed() == stored.captured_through()
    assert store_proxy.log_entries()


@pytest.mark.sampled
def test_a_commit_whose_answer_is_lost_is_landed_once(
    stored: Capturing, store_proxy: StoreProxy
) -> None:
    window = stored.begin_with_one_insert()
    for index in range(2):
        with store_proxy.making(_at_commit("cut after")):
            try:
                stored.capture(window)
            except TransientError:
                stored.capture(window)
        assert stored.texts("t") == [[str(i + 1)] for i in range(index + 1)]
        stored.database.execute(f"insert into t values ({index + 2})")
        window = stored.window()


def test_a_refused_commit_that_is_in_the_log_keeps_its_files(
    s3_lake: Lake, store_proxy: StoreProxy
) -> None:
    """A client that repeats a PUT after a lost answer is refused because of its own entry."""
    registry = RawZone(s3_lake, NAME).relations
    registry.register(1, relation("orders", 1), Lsn(10))
    registry.flush()
    registry.register(1, relation("items", 2), Lsn(20))
    # 503 after the PUT: delta-rs repeats the PUT, and finds its own log entry.
    with store_proxy.making(_at_commit("SlowDown after")):
        registry.flush()
    table = RawZone(s3_lake, NAME).relations.table.load()
    assert table is not None
    assert len(table.to_pyarrow_table().to_pylist()) == 2


@pytest.mark.parametrize("what", ["SlowDown", "cut"])
def test_a_short_fault_is_retried(what: str, stored: Capturing, store_proxy: StoreProxy) -> None:
    window = stored.begin_with_one_insert()
    with store_proxy.making(Fault(what, kind="PUT", contains=".parquet", times=2)):
        stored.capture(window)
    assert stored.texts("t") == [["1"]]


@pytest.mark.sampled
def test_a_commit_that_the_store_applies_after_the_timeout_is_landed_once(
    stored: Capturing, store_proxy: StoreProxy
) -> None:
    """The next run begins before the store gets the first commit."""
    stored.capture(stored.begin_with_one_insert())
    stored.database.execute("insert into t values (2)")
    window, before = stored.window(), stored.confirmed()
    impatient = RawZone(Lake(stored.zone.lake.uri, {"timeout": "500ms"}), NAME)
    late = dataclasses.replace(_at_commit("delay"), seconds=1.0)
    store_proxy.forget()
    with store_proxy.making(late, Fault("delay", contains=".parquet", times=2, seconds=0.2)):
        with pytest.raises(TransientError, match="operation timed out"):
            dataclasses.replace(stored, zone=impatient).capture(window)
        assert stored.confirmed() == before
        try:
            stored.capture(window)
        except TransientError as error:
            # On a slow machine, the store applies the commit before the run has landed its rows.
            assert "Another capture has landed" in str(error)
            stored.capture(window)
    assert store_proxy.faults() == {"delay": 3}
    stored.database.execute("insert into t values (3)")
    stored.capture()
    assert stored.texts("t") == [["1"], ["2"], ["3"]]


@pytest.mark.sampled
def test_a_capture_recovers_by_itself_when_the_store_does(
    capturing: Capturing, s3_lake: Lake, store_proxy: StoreProxy
) -> None:
    """H7: with the retries that delta-rs has by default."""
    stored = dataclasses.replace(capturing, zone=RawZone(s3_lake, NAME))
    stored.capture(stored.begin_with_one_insert())
    stored.database.execute("insert into t values (2)")
    window, before = stored.window(), stored.confirmed()
    store_proxy.forget()
    with ThreadPoolExecutor(1) as pool:
        with store_proxy.making(Fault("SlowDown", "PUT", contains="_delta_log/")):
            landing = pool.submit(stored.capture, window)
            wait_until(lambda: store_proxy.faults()["SlowDown"] > 2, "retries")
            assert stored.confirmed() == before
            assert stored.texts("t") == [["1"]], "nothing is half-visible"
        landing.result()
    assert stored.texts("t") == [["1"], ["2"]]
    assert stored.confirmed() == window.end


@pytest.mark.sampled
@pytest.mark.parametrize(("what", "part"), [("SlowDown", "_delta_log/"), ("ExpiredToken", "part-")])
def test_a_snapshot_without_the_store_leaves_nothing_half_visible(
    what: str, part: str, stored: Capturing, store_proxy: StoreProxy
) -> None:
    """H7."""
    stored.database.execute(
        "create table t (id int primary key); create publication pub for all tables"
    )
    stored.database.execute("insert into t select generate_series(1, 100)")

    def snapshot() -> list[SnapshotReport]:
        return snapshot_tables(stored.settings, stored.zone, stored.slot, "pub")

    fault = Fault(what, "PUT", contains=f"raw/snapshots/{part}")
    with store_proxy.making(fault), pytest.raises(PgcdcError):
        snapshot()
    assert store_proxy.faults()[what] > 0
    assert stored.zone.snapshots.complete_snapshots() == []
    (report,) = snapshot()
    assert stored.zone.snapshots.complete_snapshots()[0].row_count == 100
    copied = copied_rows(stored.zone, "t", report.snapshot_lsn)
    assert sorted(int(row[0] or 0) for row in copied) == list(range(1, 101))
    stored.database.execute("insert into t values (101)")
    stored.capture()
    assert stored.texts("t") == [["101"]]


@pytest.mark.sampled
@pytest.mark.parametrize("part", [".parquet", "_delta_log/"])
@pytest.mark.parametrize("what", ["SlowDown", "cut", "ExpiredToken"])
def test_a_long_fault_loses_nothing(
    what: str, part: str, stored: Capturing, store_proxy: StoreProxy
) -> None:
    first = stored.begin_with_one_insert()
    stored.capture(first)
    stored.database.execute("insert into t values (2)")
    window, before = stored.window(), stored.confirmed()
    with (
        store_proxy.making(Fault(what, kind="PUT", contains=part)),
        pytest.raises(PgcdcError) as caught,
    ):
        stored.capture(window)
    assert isinstance(caught.value, TransientError) == (what != "ExpiredToken"), caught.value
    assert "ExpiredToken" in str(caught.value) or what != "ExpiredToken"
    assert stored.confirmed() == before
    assert stored.texts("t") == [["1"]], "nothing is half-visible"
    stored.capture(window)
    assert stored.texts("t") == [["1"], ["2"]]


@pytest.mark.sampled
def test_an_unreadable_store_is_not_a_damaged_table(
    stored: Capturing, store_proxy: StoreProxy
) -> None:
    window = stored.begin_with_one_insert()
    stored.capture(window)
    with store_proxy.making(Fault("SlowDown")), pytest.raises(TransientError):
        stored.zone.changes.captured_through(1)
    with store_proxy.making(Fault("ExpiredToken")), pytest.raises(PgcdcError) as caught:
        stored.zone.changes.captured_through(1)
    assert not isinstance(caught.value, TransientError)
