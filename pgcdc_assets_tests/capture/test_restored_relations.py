"""A capture whose `raw/relations` alone was restored from an earlier time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from deltalake import DeltaTable

from pgcdc_assets.capture.epoch import renew_epoch
from pgcdc_assets.capture.snapshots.run import snapshot_tables
from pgcdc_assets.errors import RawZoneError
from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.support.captures import Capturing

pytestmark = pytest.mark.postgres


def test_numbers_of_lost_relation_versions_are_not_used_again(capturing: Capturing) -> None:
    capturing.begin("create table t (id int primary key)")
    for number in (1, 2, 3):
        capturing.database.execute(f"alter table t add c{number} int")
        capturing.database.execute(f"insert into t (id) values ({number})")
        capturing.capture()
    uri, window = capturing.zone.relations.table.uri, capturing.captured_through()

    def restored(version: int) -> Capturing:
        DeltaTable(uri).restore(version)
        return replace(capturing, zone=RawZone(capturing.zone.lake, capturing.zone.name))

    capturing.database.execute("insert into t (id) values (4)")
    older = restored(1)
    with pytest.raises(RawZoneError, match=r"raw/relations.* has 1 .* 3 of them"):
        older.capture()
    with pytest.raises(RawZoneError, match=r"raw/relations.* has 1 .* 3 of them"):
        snapshot_tables(older.settings, older.zone, older.slot, "pub")
    assert (older.captured_through(), len(older.zone.relations.versions(1))) == (window, 1)
    whole = restored(3)
    whole.capture()
    assert len(whole.zone.relations.versions(1)) == 3

    older = restored(1)
    renewed = renew_epoch(older.settings, older.zone, older.slot, "pub")
    older.database.execute("insert into t (id) values (5)")
    older.capture(LsnWindow.of(2, renewed.start_lsn, older.flush_lsn()))
    assert len(older.zone.relations.versions(2)) == 1
