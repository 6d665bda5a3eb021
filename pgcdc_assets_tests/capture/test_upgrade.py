"""An upgrade of the server, by pg_upgrade or into a new cluster, begins an epoch and loses nothing.

From Postgres 17 on, pg_upgrade keeps slots. pg_upgrade needs the program pg_resetwal of the earlier
version, which the archive of 17 in Maven Central does not have: docs/testing.md names one that has.
An upgrade from 18 to 18 keeps slots as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pgcdc_assets.capture.epoch import renew_epoch
from pgcdc_assets.capture.snapshots.run import snapshot_tables
from pgcdc_assets.cli.check import examine_capture
from pgcdc_assets.demo.programs import binaries, run_program
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.errors import RawZoneError
from pgcdc_assets.local import free_port
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets_tests.support.captures import Capturing
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.handover import copied_rows
from pgcdc_assets_tests.support.server_folder import new_server_folder
from pgcdc_assets_tests.support.servers import SETTINGS
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.slow]

SLOT = "pgcdc_upgraded"
_IS_QUIET = """
select pg_current_wal_insert_lsn() = pg_current_wal_flush_lsn() and not exists (
  select from pg_stat_activity
   where backend_type in ('client backend', 'walsender') and pid <> pg_backend_pid())
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that the user of the servers may write to."""
    found = new_server_folder("upgrade")
    yield found
    found.rmdir()


def _create(server: EmbeddedServer, *options: str) -> None:
    """Create an empty cluster, which is not started."""
    server._make_folders()
    status, said = run_program(
        server.bin_dir / "initdb",
        *("--auth=trust", "--encoding=UTF8", "--locale=C", "--username=postgres", "--no-sync"),
        *("--pgdata", str(server.data_dir), *options),
    )
    assert status == 0, said
    with (server.data_dir / "postgresql.conf").open("a") as file:
        file.write("\ninclude = 'pgcdc.conf'\n")
    server._write_settings(free_port())


def _upgrade(old: EmbeddedServer, new: EmbeddedServer) -> None:
    """Upgrade a stopped cluster."""
    # It writes to the current folder.
    command = (
        f"cd {new.data_dir} && exec {new.bin_dir}/pg_upgrade --no-sync -U postgres "
        f"-b {old.bin_dir} -B {new.bin_dir} -d {old.data_dir} -D {new.data_dir} "
        f"-p {free_port()} -P {free_port()} -s {new.data_dir}"
    )
    status, said = run_program(Path("/bin/sh"), "-c", command)
    assert status == 0, said


def _capturing(server: EmbeddedServer, zone: RawZone) -> Capturing:
    database = Database(server, "postgres")
    return Capturing(database, zone, SLOT, database.conninfo)


def _load(old: EmbeddedServer, new: EmbeddedServer) -> None:
    """Copy the database of a running cluster into another one, by the programs of the new one."""
    command = (
        f"{new.bin_dir}/pg_dump -d '{old.conninfo()}' | "
        f"{new.bin_dir}/psql -X -q -v ON_ERROR_STOP=1 -d '{new.conninfo()}'"
    )
    status, said = run_program(Path("/bin/sh"), "-c", command)
    assert status == 0, said


def _fill(source: Capturing) -> None:
    """Copy a table of fifty rows, and capture ten updates; then nothing writes any more."""
    source.database.execute("create table t (id int primary key, note text)")
    source.database.execute("create publication pub for table t")
    source.database.execute("insert into t select i, 'first' from generate_series(1, 50) i")
    snapshot_tables(source.settings, source.zone, SLOT, "pub")
    source.database.execute("update t set note = 'second' where id <= 10")
    source.capture()


def _continue(upgraded: Capturing, version: int) -> None:
    """Follow the guide: the source is refused until a new epoch begins, which has all rows."""
    zone = upgraded.zone
    capture = CdcCapture("test", "pub", (CdcTable("public", "t"),), slot=SLOT)
    findings = examine_capture(upgraded.settings, capture, zone)
    assert [each.code for each in findings if each.severity == "error"] == ["source"]
    through = upgraded.captured_through()
    with pytest.raises(RawZoneError, match="pgcdc renew"):
        upgraded.capture(LsnWindow.of(1, through, Lsn(through + 8)))
    renewed = renew_epoch(upgraded.settings, zone, SLOT, "pub")
    assert (renewed.epoch, renewed.server_version // 10000) == (2, version)
    [report] = snapshot_tables(upgraded.settings, zone, SLOT, "pub")
    assert report.row_count == 50
    copied = copied_rows(zone, "t", report.snapshot_lsn)
    assert sum(note == "second" for _, note in copied) == 10

    upgraded.database.execute("delete from t where id = 1")
    start = upgraded.captured_through()
    upgraded.capture(LsnWindow.of(2, start, upgraded.flush_lsn()))
    assert "source" not in {each.code for each in examine_capture(upgraded.settings, capture, zone)}
    order = [(row["epoch"], row["op"]) for row in upgraded.rows() if row["table"]]
    assert order == [(1, "U")] * 10 + [(2, "D")]


@pytest.mark.sampled
@pytest.mark.parametrize("before", [16, 18])
def test_after_a_load_into_a_new_cluster_a_new_epoch_has_all_rows(
    folder: Path, zone: RawZone, before: int
) -> None:
    """H11: the new cluster has lower LSNs than the old one, and no slot."""
    old = EmbeddedServer(folder / "old", before, SETTINGS)
    new = EmbeddedServer(folder / "new", 18, SETTINGS)
    try:
        old.start()
        source = _capturing(old, zone)
        for _ in range(10):
            source.database.execute("create table x (); drop table x; select pg_switch_wal()")
        _fill(source)
        new.start()
        _load(old, new)
        old.stop()
        upgraded = _capturing(new, zone)
        assert upgraded.flush_lsn() < source.captured_through()
        _continue(upgraded, 18)
    finally:
        old.remove()
        new.remove()


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("before", "after"),
    [(16, 18), (18, 18), pytest.param(17, 18, marks=pytest.mark.soak)],
)
def test_after_an_upgrade_a_new_epoch_has_all_rows(
    folder: Path, zone: RawZone, before: int, after: int
) -> None:
    """H11: the slot is kept or not, the writers pause, and the LSNs of two epochs differ."""
    programs = binaries(before)
    if programs is None or not (programs / "pg_resetwal").exists():
        pytest.skip(f"pg_resetwal of Postgres {before} is not installed")
    settings = {**SETTINGS, "autovacuum": "off"}
    old = EmbeddedServer(folder / "old", before, settings)
    new = EmbeddedServer(folder / "new", after, settings)
    try:
        old.start()
        source = _capturing(old, zone)
        _fill(source)
        # pg_upgrade keeps a slot whose transactions are all confirmed, empty ones as well. The end
        # of an earlier session drops its temporary tables, and this commit is flushed later.
        wait_until(lambda: source.database.value(_IS_QUIET), "the end of the sessions")
        end = Lsn.parse(source.database.value("select pg_current_wal_flush_lsn()::text"))
        start = source.captured_through()
        if start < end:
            source.capture(LsnWindow.of(1, start, end))
        old.stop()

        # 16 creates clusters without checksums, and both clusters must agree.
        _create(new, *(["--no-data-checksums"] if before < 18 else []))
        _upgrade(old, new)
        new.start()
        upgraded = _capturing(new, zone)
        slots = upgraded.database.query("select slot_name from pg_replication_slots")
        assert slots == ([(SLOT,)] if before >= 17 else [])
        _continue(upgraded, after)
    finally:
        old.remove()
        new.remove()
