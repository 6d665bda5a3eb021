"""Batches of changes in the decoder's schema."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pyarrow as pa

from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.protocol.relation import Column, Relation, ReplicaIdentity
from pgcdc_assets.raw import schema
from pgcdc_assets.raw.delta.files import WrittenFile
from pgcdc_assets.raw.delta.scan import scan_changes
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.ranges import LandedRange
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.support.raw.epochs import EPOCH

COMMIT_TS = dt.datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=dt.UTC)


def window(start: int, end: int, epoch: int = 1) -> LsnWindow:
    return LsnWindow.of(epoch, start, end)


def change(commit_lsn: int, ordinal: int = 0, **values: Any) -> dict[str, Any]:
    """Return a change, by default an insert into shop.orders."""
    defaults: dict[str, Any] = {
        "commit_lsn": commit_lsn,
        "ordinal": ordinal,
        "xid": 700 + commit_lsn,
        "commit_ts": COMMIT_TS,
        "op": "I",
        "relation_id": 16400,
        "relation_version": 1,
        "schema": "shop",
        "table": "orders",
        "new": [str(commit_lsn), str(ordinal), None, ""],
    }
    return defaults | values


def batch(*rows: dict[str, Any]) -> pa.RecordBatch:
    """Return a batch of rows with the decoder's columns."""
    columns = [f for f in schema.CHANGES if f.name not in ("epoch", "window")]
    return pa.RecordBatch.from_pylist(list(rows), schema=pa.schema(columns))


def transaction(commit_lsn: int, row_count: int, **values: Any) -> pa.RecordBatch:
    return batch(*(change(commit_lsn, ordinal, **values) for ordinal in range(row_count)))


def landed(zone: RawZone, epoch: int = 1) -> list[tuple[int, int]]:
    """Return (commit_lsn, ordinal) of all rows of the raw zone in stream order, with duplicates."""
    rows = scan_changes(
        zone.changes.table, epoch=epoch, start=0, end=2**62, columns=["commit_lsn", "ordinal"]
    )
    return sorted((r["commit_lsn"], r["ordinal"]) for piece in rows for r in piece.to_pylist())


def zone_with_window(lake: Lake) -> RawZone:
    """Return a raw zone with an epoch and an empty window."""
    zone = RawZone(lake, "c")
    zone.epochs.append(EPOCH)
    land_empty(zone, 0)
    return zone


def land_empty(zone: RawZone, number: int) -> Lsn:
    """Land an empty window; return its end."""
    window = LsnWindow.of(1, number * 100, number * 100 + 100)
    assert not zone.changes.land(window, []).already_landed
    return window.end


def relation(table: str = "orders", relation_id: int = 16400, *names: str) -> Relation:
    columns = tuple(
        Column(name=name, type_oid=25, is_key=number == 0, attnum=number + 1, base_type="text")
        for number, name in enumerate(names or ("id", "note"))
    )
    return Relation(
        relation_id, "shop", table, ReplicaIdentity.DEFAULT, columns, (columns[0].name,)
    )


def landed_range(number: int) -> LandedRange:
    """Return a range of ten pages of shop.orders, the first with number 0."""
    now = dt.datetime.now(dt.UTC)
    start = 10 * number
    return LandedRange(
        epoch=1,
        schema="shop",
        table="orders",
        snapshot_lsn=Lsn(1000 + start),
        relation_id=16400,
        relation_version=1,
        start_page=start,
        end_page=start + 10,
        page_count=100,
        xmin=2**33 + start,
        storage="1 digest",
        row_count=5,
        byte_count=50,
        rescued_count=1,
        began_at=now,
        read_at=now,
        files=(WrittenFile(f"part-{start}.parquet", 7, 5, {"numRecords": 5}, {"epoch": "1"}),),
    )
