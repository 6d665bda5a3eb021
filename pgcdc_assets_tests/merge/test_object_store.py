"""Merges of tables in an S3 store by Spark and by delta-rs, with faults of the store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.tables.state import read_watermark
from pgcdc_assets_tests.support.merge.races import RACES
from pgcdc_assets_tests.support.merge.store_merges import StoreMerges
from pgcdc_assets_tests.support.object_store import StoreProxy
from pgcdc_assets_tests.support.object_store_proxy import Fault

# Spark merges a history; delta-rs commits a small current image.
KINDS = ("history", "current_image")

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.fixture
def store_zone(s3_lake: Lake) -> RawZone:
    return RawZone(s3_lake, "test")


@pytest.fixture
def merges(store_zone: RawZone) -> Iterator[StoreMerges]:
    merges = StoreMerges(store_zone)
    yield merges
    merges.close()


@pytest.mark.sampled
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_short_faults_lose_and_repeat_nothing_and_the_table_is_maintained(
    kind: str, store_zone: RawZone, merges: StoreMerges, store_proxy: StoreProxy
) -> None:
    race = RACES[kind]
    landing = race.land_snapshot(store_zone)
    assert merges.merge(kind, landing.windows[-1]) == ""
    busy = Fault("SlowDown", times=3, contains="/scd")
    # The store applies the commit, and its answer is lost.
    lost = Fault("cut after", "PUT", contains="_delta_log/0", is_conditional=True, times=1)
    for changes in (race.first, race.second):
        window = landing.land(changes)
        with store_proxy.making(lost, busy):
            assert merges.merge(kind, window) == ""
    assert merges.contents(kind) == race.outcome
    merges.maintain(kind)
    assert merges.contents(kind) == race.outcome
    entries = [
        request
        for request in store_proxy.requests
        if request.kind == "PUT" and "/scd" in request.key and request.key.endswith(".json")
    ]
    assert entries and all(e.is_conditional for e in entries if "_delta_log/0" in e.key)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["SlowDown", "cut"])
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
        assert merges.merge(kind, window).startswith("TransientError: ")
    assert merges.contents(kind) == before
    names = target.schema, target.table, target.scd[0]
    assert read_watermark(store_zone.lake, "test", *names) == landing.windows[0].end_position
    assert merges.merge(kind, window) == ""
    assert merges.merge(kind, landing.land(race.second)) == ""
    assert merges.contents(kind) == race.outcome
