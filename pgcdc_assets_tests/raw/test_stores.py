"""Relation versions, snapshots and epochs in the raw zone."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pgcdc_assets.errors import ConfigurationError, RawZoneError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.raw import schema, snapshots
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.snapshots import Snapshot
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.support.raw.epochs import EPOCH
from pgcdc_assets_tests.support.raw.rows import relation


def texts(*rows: list[str | None]) -> pa.RecordBatch:
    return pa.record_batch({"new": pa.array(list(rows), schema.CHANGES.field("new").type)})


def test_relation_versions_count_from_one_per_relation(zone: RawZone) -> None:
    registry = zone.relations
    assert registry.register(1, relation("orders", 1), Lsn(10)) == 1
    assert registry.register(1, relation("items", 2), Lsn(10)) == 1
    assert registry.register(1, relation("orders", 1, "id", "note", "more"), Lsn(20)) == 2
    registry.flush()
    found = [(v.relation.table, v.version, v.lsn) for v in registry.versions(1)]
    assert found == [("orders", 1, 10), ("orders", 2, 20), ("items", 1, 10)]


def test_a_known_schema_keeps_its_version_in_a_later_process(zone: RawZone) -> None:
    zone.relations.register(1, relation("orders", 1), Lsn(10))
    zone.relations.register(1, relation("orders", 1, "id", "more"), Lsn(20))
    zone.relations.flush()

    later = RawZone(zone.lake, "test").relations
    assert later.register(1, relation("orders", 1), Lsn(30)) == 1
    assert later.register(2, relation("orders", 1, "id", "more"), Lsn(30)) == 1, "another epoch"
    later.flush()
    assert [v.relation for v in later.versions(2)] == [relation("orders", 1, "id", "more")]
    assert later.versions(1)[0].relation == relation("orders", 1)


def test_versions_that_were_not_flushed_are_discarded(zone: RawZone) -> None:
    zone.relations.register(1, relation("orders", 1), Lsn(10))
    zone.relations.discard()
    zone.relations.flush()
    assert zone.relations.versions(1) == []


def test_a_committed_snapshot_is_complete_even_without_rows(zone: RawZone) -> None:
    store = zone.snapshots
    assert store.land_snapshot(1, Lsn(50), relation("full"), 1, [texts(["1"], [None])]) == 2
    assert store.land_snapshot(1, Lsn(50), relation("empty"), 3, []) == 0
    assert store.complete_snapshots() == [
        Snapshot(1, Lsn(50), "shop", "empty", 3, 0),
        Snapshot(1, Lsn(50), "shop", "full", 1, 2),
    ]
    assert store.complete_snapshots(epoch=2) == []


def test_a_failed_snapshot_leaves_nothing(zone: RawZone) -> None:
    def broken() -> Iterator[pa.RecordBatch]:
        yield texts(["1"])
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        zone.snapshots.land_snapshot(1, Lsn(50), relation(), 1, broken())
    assert zone.snapshots.complete_snapshots() == []
    assert list(Path(zone.snapshots.table.uri).glob("*.parquet")) == []


@pytest.mark.parametrize("fails", [False, True])
def test_row_groups_encoded_beside_the_source_are_in_order_or_leave_nothing(
    fails: bool, zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "ROW_GROUP_BYTES", 1)

    def batches() -> Iterator[pa.RecordBatch]:
        yield from (texts([str(number)] * 1000) for number in range(50))
        if fails:
            raise ConnectionError("gone")

    with pytest.raises(ConnectionError) if fails else contextlib.nullcontext():
        zone.snapshots.land_snapshot(1, Lsn(50), relation(), 1, batches())
    files = list(Path(zone.snapshots.table.uri).glob("*.parquet"))
    found = [pq.ParquetFile(file).read(columns=["new"]) for file in files]
    assert [row[0] for table in found for row in table.column("new").to_pylist()] == (
        [] if fails else [str(number) for number in range(50)]
    )
    assert [pq.read_metadata(file).num_row_groups for file in files] == ([] if fails else [50])


def test_the_snapshot_of_an_lsn_is_landed_once(zone: RawZone) -> None:
    for _ in range(2):
        zone.snapshots.land_snapshot(1, Lsn(50), relation(), 1, [texts(["1"], ["2"])])
    zone.snapshots.land_snapshot(1, Lsn(80), relation(), 1, [texts(["1"])])
    found = [(c.snapshot_lsn, c.row_count) for c in zone.snapshots.complete_snapshots()]
    assert found == [(50, 2), (80, 1)]


def test_epochs_follow_each_other(zone: RawZone) -> None:
    assert zone.epochs.latest() is None
    zone.epochs.append(EPOCH)
    second = dataclasses.replace(EPOCH, epoch=2, start_lsn=Lsn(500))
    zone.epochs.append(second)
    assert zone.epochs.all() == [EPOCH, second]
    assert zone.epochs.latest() == second
    with pytest.raises(RawZoneError, match="epoch 2 cannot be recorded, the next epoch is 3"):
        zone.epochs.append(second)


def test_the_error_names_both_slots_of_a_raw_zone(zone: RawZone) -> None:
    source = {"database": "db", "system_identifier": EPOCH.system_identifier}
    assert zone.epochs.check_source(slot="pgcdc_test", **source) is None
    zone.epochs.append(EPOCH)
    assert zone.epochs.check_source(slot="pgcdc_test", **source) == EPOCH
    with pytest.raises(RawZoneError, match=r"slot pgcdc_test .* not from slot mine .* --name test"):
        zone.epochs.check_source(slot="mine", **source)


def test_the_lake_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGCDC_LAKE", "s3://bucket/lake/")
    assert Lake.from_environment("x").path("a", "b") == "s3://bucket/lake/a/b"
    monkeypatch.delenv("PGCDC_LAKE")
    assert Lake.from_environment("/tmp/x").uri == "/tmp/x"
    assert Lake("relative").is_local and Lake("relative").uri.startswith("/")
    with pytest.raises(ConfigurationError, match="PGCDC_LAKE"):
        Lake("")


@pytest.mark.parametrize("folder", ["a%20b", "a[b", "a]b", "a|b", "a^b", "a\\b"])
def test_a_lake_in_a_folder_that_delta_rs_misreads_is_refused(folder: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="in its path, which delta-rs cannot"):
        Lake(str(tmp_path / folder))


@pytest.mark.parametrize("folder", ["a b", "100%", "a#b?c*d", "straße😀", "a;b{c}'d`e<f>g$h~i=j"])
def test_a_lake_in_a_folder_of_another_name_works(folder: str, tmp_path: Path) -> None:
    zone = RawZone(Lake(str(tmp_path / folder)), "t")
    assert zone.epochs.latest() is None
    zone.epochs.append(EPOCH)
    assert zone.epochs.latest() is not None
    assert (tmp_path / folder / "t" / "raw").is_dir()
