"""Tables of an S3 store that are known by their newest version: the requests, and no stale answer.

The same for local tables: `tables/test_shared_states.py`.
"""

from __future__ import annotations

import json

import pyarrow.fs as pafs
import pytest

from pgcdc_assets.errors import TransientError
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.raw.delta.files import filesystem
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.relations.definitions import SeenDefinition
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.support.object_store import StoreProxy
from pgcdc_assets_tests.support.object_store_proxy import Fault
from pgcdc_assets_tests.support.raw.rows import land_empty, relation, zone_with_window


@pytest.fixture
def zone(s3_lake: Lake) -> RawZone:
    """Return a raw zone with an epoch and a window."""
    return zone_with_window(s3_lake)


def again(zone: RawZone) -> RawZone:
    """Return the raw zone of another run in the same process."""
    return RawZone(zone.lake, zone.name)


def test_polling_asks_for_the_newest_commit_alone(zone: RawZone, store_proxy: StoreProxy) -> None:
    """A run that continues polls twice a second."""
    assert zone.changes.captured_through(1) == 100
    store_proxy.forget()
    for _ in range(10):
        assert again(zone).changes.captured_through(1) == 100
        assert len(again(zone).changes.windows(1)) == 1
        assert again(zone).schema_events.read() == []
    polls = store_proxy.counts()
    assert set(polls) == {"HEAD", "GET", "LIST"}
    assert polls["LIST"] <= 2, "the tables that do not exist, once each"
    store_proxy.forget()
    for _ in range(10):
        assert again(zone).changes.captured_through(1) == 100
    assert store_proxy.counts() == {"HEAD": 20}


@pytest.mark.sampled
def test_each_landing_is_noticed(zone: RawZone) -> None:
    for number in range(1, 13):
        end = land_empty(again(zone), number)
        assert zone.changes.captured_through(1) == end
        assert len(zone.changes.windows(1)) == number + 1


def test_a_replaced_table_with_the_same_version_is_noticed(zone: RawZone) -> None:
    assert zone.changes.captured_through(1) == 100
    files = filesystem(zone.lake, zone.changes.table.uri)
    for found in files.get_file_info(pafs.FileSelector("", recursive=True)):
        if found.is_file:
            files.delete_file(found.path)
    zone.changes.land(LsnWindow.of(1, 0, 50), [])
    assert zone.changes.captured_through(1) == 50
    assert [summary.window.end for summary in zone.changes.windows(1)] == [50]


def test_a_new_table_is_noticed(zone: RawZone) -> None:
    assert zone.snapshots.complete_snapshots() == []
    assert again(zone).snapshots.complete_snapshots() == []
    zone.snapshots.table.load_or_create()
    assert zone.snapshots.table.newest() is not None


def store_look(zone: RawZone, digest: str, comment: str) -> None:
    text = json.dumps({"comments": {"0": comment}})
    seen = SeenDefinition(TableName("shop", "t"), Lsn(5), text)
    assert zone.definitions.replace(1, zone.definitions.read(1), digest, {7: seen})


def test_a_look_at_the_catalog_is_read_once(zone: RawZone, store_proxy: StoreProxy) -> None:
    assert zone.definitions.newest(1).digest is None
    for number in range(3):
        store_look(again(zone), f"d{number}", f"c{number}")
        look = zone.definitions.newest(1)
        assert (look.digest, look.comments(7), look.comments(8)) == (
            f"d{number}",
            {0: f"c{number}"},
            None,
        )
    store_proxy.forget()
    assert again(zone).definitions.newest(1) is look
    assert zone.definitions.newest(2).tables == {}
    assert store_proxy.counts() == {"HEAD": 4}


def test_relation_versions_are_read_once(zone: RawZone, store_proxy: StoreProxy) -> None:
    known = []
    for number in range(3):
        registry = again(zone).relations
        registry.register(1, relation("t", 7, "id", f"c{number}"), Lsn(number))
        registry.flush()
        known = zone.relations.versions(1)
        assert [each.version for each in known] == list(range(1, number + 2))
    store_proxy.forget()
    assert again(zone).relations.versions(1) == known
    assert store_proxy.counts() == {"HEAD": 2}


@pytest.mark.sampled
def test_a_busy_store_is_an_error_and_no_old_answer(zone: RawZone, store_proxy: StoreProxy) -> None:
    assert zone.changes.captured_through(1) == 100
    with store_proxy.making(Fault("cut")), pytest.raises(TransientError):
        zone.changes.captured_through(1)
    assert land_empty(zone, 1) == zone.changes.captured_through(1)
