"""`raw/epochs`, and the tables of earlier epochs that a new epoch follows."""

from __future__ import annotations

from dataclasses import fields, replace

import pyarrow as pa
import pytest

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.raw.epochs import Epoch
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.support.raw.epochs import EPOCH
from pgcdc_assets_tests.support.raw.rows import relation


def _take_snapshot(zone: RawZone, epoch: int, lsn: int, table: str, oid: int) -> None:
    found = relation(table, oid)
    version = zone.relations.register(epoch, found, Lsn(lsn))
    zone.relations.flush()
    zone.snapshots.land_snapshot(epoch, Lsn(lsn), found, version, [])


@pytest.mark.parametrize(
    ("shared", "followed"),
    [
        ((None, None), {"t": 1, "u": 3, "v": 4}),
        ((None, Lsn(200)), {"t": 1, "u": 3}),
        ((None, Lsn(120)), {"t": 1, "u": 2}),
        ((Lsn(110), Lsn(200)), {"t": 1, "u": 3}),
        ((Lsn(110), Lsn(120)), {"t": 1}),
        ((None, Lsn(0)), {}),
    ],
)
def test_a_new_epoch_follows_the_tables_of_the_wal_that_its_server_has(
    zone: RawZone, shared: tuple[Lsn | None, Lsn | None], followed: dict[str, int]
) -> None:
    """A restored server gives the OID of a later table to another table."""
    for number, through in enumerate((None, *shared), 1):
        zone.epochs.append(replace(EPOCH, epoch=number, shared_through=through))
    _take_snapshot(zone, 1, 100, "t", 1)
    _take_snapshot(zone, 1, 120, "u", 2)
    _take_snapshot(zone, 2, 200, "u", 3)
    _take_snapshot(zone, 2, 220, "v", 4)
    expected = {TableName("shop", table): oid for table, oid in followed.items()}
    assert zone.followed_ids() == expected


def test_a_lake_of_an_early_release_has_epochs_without_the_end_of_the_shared_wal(
    zone: RawZone,
) -> None:
    table = zone.epochs.table
    early = replace(table, schema=pa.schema(list(table.schema)[:-1]))
    row = {f.name: getattr(EPOCH, f.name) for f in fields(Epoch)[:-1]}
    assert early.commit_rows(early.load_or_create(), [row], app_id="a", app_version=1)
    assert zone.epochs.all() == [EPOCH]
    second = replace(EPOCH, epoch=2, shared_through=Lsn(500))
    zone.epochs.append(second)
    assert zone.epochs.all() == [EPOCH, second]
