"""`pgcdc renew`: another slot in the settings, and what status and check print of such sources."""

from __future__ import annotations

import pytest

from pgcdc_assets.capture.snapshots.run import snapshot_tables
from pgcdc_assets.cli import main, status
from pgcdc_assets.orchestration.build import build_cdc_definitions
from pgcdc_assets.orchestration.project import code_location
from pgcdc_assets.orchestration.project.code_location import CodeLocation, find_captures
from pgcdc_assets.orchestration.resources import LakeResource, PostgresResource
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets_tests.support.database import Database

pytestmark = pytest.mark.postgres


def start(database: Database, lake: Lake, slot: str) -> None:
    """Publish table `a`, and take its snapshot."""
    database.execute("create table a (id int primary key)")
    database.execute("create publication pub for table a")
    snapshot_tables(database.settings(), RawZone(lake, "t"), slot, "pub")


def load(database: Database, lake: Lake, slot: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the commands find a capture of table `a`."""
    definitions = build_cdc_definitions(
        CdcCapture("t", "pub", (CdcTable("public", "a"),), slot=slot),
        postgres=PostgresResource(capture="t", conninfo=database.conninfo),
        lake=LakeResource(uri=lake.uri),
    )
    location = CodeLocation(definitions, find_captures(definitions))
    # The command of the status has imported the function.
    for module in (code_location, status):
        monkeypatch.setattr(module, "load_location", lambda module: location)


@pytest.fixture
def slot(database: Database, lake: Lake, monkeypatch: pytest.MonkeyPatch) -> str:
    """Take the snapshot of table `a`, and let the commands find the capture."""
    slot = f"s_{database.name}"
    start(database, lake, slot)
    load(database, lake, slot, monkeypatch)
    return slot


def test_the_slot_that_the_settings_named_before_is_left_and_printed(
    database: Database,
    lake: Lake,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The server would keep its WAL until the disk is full."""
    before, after = (f"{name}_{database.name}" for name in ("before", "after"))
    start(database, lake, before)
    load(database, lake, after, monkeypatch)

    assert main(["renew", "--name", "t"]) == 0
    printed = capsys.readouterr().out
    assert f"epoch 2 of slot {after} starts at" in printed
    assert f"Slot {before} of epoch 1 still exists" in printed
    drop = f"select pg_drop_replication_slot('{before}')"
    assert drop in printed
    database.execute(drop)


@pytest.mark.usefixtures("slot")
def test_a_table_without_a_snapshot_of_the_new_epoch_is_not_ok(
    database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table lacks the changes between the epochs until its snapshot is merged."""
    assert main(["status"]) == 0
    assert "waits for its merge" in capsys.readouterr().out
    database.drop_slots()
    assert main(["check"]) == 2
    assert "pgcdc renew --name t" in capsys.readouterr().out

    assert main(["renew", "--name", "t"]) == 0
    capsys.readouterr()
    assert main(["status"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "public.a" in line]
    assert "never" in line
    assert line.endswith("waits for its snapshot")


def test_the_check_of_a_lost_slot_names_the_capture(
    slot: str, database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    with database.unreserved_slots():
        database.execute("checkpoint")
        assert main(["check"]) == 2
    assert f"{slot} is lost" in (printed := capsys.readouterr().out)
    assert "pgcdc renew --name t" in printed


@pytest.mark.usefixtures("slot")
def test_the_status_names_a_dropped_table(
    database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line of the table is `ok`, because its captured changes are merged."""
    assert main(["status"]) == 0
    assert "MOVED" not in capsys.readouterr().out
    database.execute("drop table a")
    assert main(["status"]) == 0
    assert "MOVED Table public.a was dropped" in (printed := capsys.readouterr().out)
    assert "remove the table from the capture's settings" in printed
