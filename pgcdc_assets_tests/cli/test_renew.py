"""`pgcdc renew` of a capture whose settings name another slot."""

from __future__ import annotations

import pytest

from pgcdc_assets.capture.snapshot import snapshot_tables
from pgcdc_assets.cli import main
from pgcdc_assets.orchestration.build import build_cdc_definitions
from pgcdc_assets.orchestration.project import code_location
from pgcdc_assets.orchestration.project.code_location import CodeLocation, find_captures
from pgcdc_assets.orchestration.resources import LakeResource, PostgresResource
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets_tests.support.database import Database

pytestmark = pytest.mark.postgres


def test_the_slot_that_the_settings_named_before_is_left_and_printed(
    database: Database,
    lake: Lake,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The server would keep its WAL until the disk is full."""
    before, after = (f"{name}_{database.name}" for name in ("before", "after"))
    database.execute("create table a (id int primary key)")
    database.execute("create publication pub for table a")
    snapshot_tables(database.settings(), RawZone(lake, "t"), before, "pub")
    definitions = build_cdc_definitions(
        CdcCapture("t", "pub", (CdcTable("public", "a"),), slot=after),
        postgres=PostgresResource(capture="t", conninfo=database.conninfo),
        lake=LakeResource(uri=lake.uri),
    )
    location = CodeLocation(definitions, find_captures(definitions))
    monkeypatch.setattr(code_location, "load_location", lambda module: location)

    assert main(["renew", "--name", "t"]) == 0
    printed = capsys.readouterr().out
    assert f"epoch 2 of slot {after} starts at" in printed
    assert f"Slot {before} of epoch 1 still exists" in printed
    drop = f"select pg_drop_replication_slot('{before}')"
    assert drop in printed
    database.execute(drop)
