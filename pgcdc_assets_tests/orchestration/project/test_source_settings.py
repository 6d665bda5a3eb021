"""Settings of the source in defs.yaml reach the slot and the stream of a run of Dagster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from deltalake import DeltaTable

from pgcdc_assets.orchestration.project.code_location import (
    CodeLocation,
    find_captures,
    load_defs_folders,
)
from pgcdc_assets.postgres.heartbeat import create_table_sql
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated

BEATS = TableName("public", "beats")


@pytest.mark.sampled
@pytest.mark.postgres
def test_a_run_of_dagster_has_the_settings_of_the_source_of_the_file(
    orchestrated: Orchestrated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`failover`, `origin`, `messages` and the heartbeat table, by their effects."""
    database = orchestrated.database
    monkeypatch.setenv("PGCDC_DSN", database.conninfo)
    database.execute(create_table_sql(BEATS))
    attributes = {
        "name": NAME,
        "publication": "pub",
        "slot": orchestrated.capture.slot,
        "lake": orchestrated.lake.uri,
        "failover": True,
        "heartbeat": {"seconds": 1, "table": str(BEATS)},
        "stream": {"origin": "none"},
        "messages": {"prefixes": ["audit"]},
        "windows": {"max_age_seconds": 0},
        "tables": [{"name": "public.a"}, {"name": "public.b"}],
    }
    folder = tmp_path / "defs" / NAME
    folder.mkdir(parents=True)
    document = {"type": "pgcdc_assets.PostgresCdcComponent", "attributes": attributes}
    (folder / "defs.yaml").write_text(yaml.safe_dump(document))
    definitions = load_defs_folders([tmp_path / "defs"])
    loaded = find_captures(definitions)
    located = replace(orchestrated, capture=loaded[NAME].capture)
    located.location = CodeLocation(definitions, loaded)

    located.copy()
    slots = "select failover from pg_replication_slots where slot_name = %s"
    assert database.value(slots, (attributes["slot"],)) is True
    origin = f"o_{database.name}"
    database.execute("select pg_replication_origin_create(%s)", (origin,))
    try:
        database.transaction(
            f"select pg_replication_origin_session_setup('{origin}')",
            "insert into a values (901, 'replicated')",
        )
        database.execute("select pg_logical_emit_message(false, 'audit', 'wanted')")
        database.execute("select pg_logical_emit_message(true, 'other', 'left out')")
        located.commit("insert into a values (902, 'own')")
        located.land()
    finally:
        database.execute("select pg_replication_origin_drop(%s)", (origin,))
    table = located.zone.changes.table.load()
    assert table is not None
    landed = [row["new"][0] for row in table.to_pyarrow_table().to_pylist() if row["new"]]
    assert "902" in landed and "901" not in landed
    assert "audit" in landed and "other" not in landed
    (request,) = located.tick("messages").run_requests
    assert located.execute(request, "messages").success
    appended = DeltaTable(located.lake.path(NAME, "messages")).to_pyarrow_table()
    assert appended.column("text").to_pylist() == ["wanted"]
    [(slot, capture, lake, epoch, heartbeat)] = database.query(
        f"select slot, capture, lake, epoch, heartbeat from {BEATS}"
    )
    assert (slot, capture, epoch) == (attributes["slot"], NAME, 1)
    assert lake == located.lake.path(NAME)
    assert heartbeat >= 1
