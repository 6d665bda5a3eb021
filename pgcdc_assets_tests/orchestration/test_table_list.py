"""Definitions of a capture that follows its publication."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.definitions_load_context import (
    DefinitionsLoadContext,
    DefinitionsLoadType,
)
from dagster._core.definitions.repository_definition import RepositoryLoadData

from pgcdc_assets.orchestration.build import build_cdc_definitions
from pgcdc_assets.orchestration.project.code_location import find_captures
from pgcdc_assets.orchestration.resources import LakeResource, PostgresResource
from pgcdc_assets.orchestration.table_list import refresh_at_load
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.table_list import ListedState, ListedTable
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets.settings.selection import TableSelection
from pgcdc_assets.table_name import TableName

NAME = "t"
A, B = TableName("public", "a"), TableName("a.b", 'B "c"/d')
CAPTURE = CdcCapture(
    NAME,
    "pub",
    (CdcTable("public", "a", scd=(1, 2)),),
    selection=TableSelection(exclude=("*.tmp_*",)),
)
NOWHERE = "host=127.0.0.1 port=1 dbname=none"


def store(lake: Lake, *names: TableName, refused: TableName | None = None) -> None:
    tables = [ListedTable(name, number) for number, name in enumerate(names)]
    if refused is not None:
        tables.append(ListedTable(refused, 99, ListedState.REFUSED, "No."))
    table_list = RawZone(lake, NAME).table_list
    base = table_list.read()
    assert table_list.replace(base, f"{base.digest}+", tables)


def build(lake: Lake) -> dg.Definitions:
    """Build the definitions while the source is down."""
    return build_cdc_definitions(
        CAPTURE,
        postgres=PostgresResource(capture=NAME, conninfo=NOWHERE),
        lake=LakeResource(uri=lake.uri),
    )


def names_of(definitions: dg.Definitions) -> list[TableName]:
    return find_captures(definitions)[NAME].capture.table_names


@contextmanager
def loading(
    load_type: DefinitionsLoadType, metadata: dict[str, Any] | None = None
) -> Iterator[DefinitionsLoadContext]:
    data = RepositoryLoadData(reconstruction_metadata=metadata or {})
    context = DefinitionsLoadContext(load_type, data)
    # `scoped` is not in the lowest release of Dagster.
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(DefinitionsLoadContext, "_instance", context)
        yield context


def test_a_capture_without_a_table_has_definitions(lake: Lake) -> None:
    definitions = build(lake)
    repository = definitions.get_repository_def()
    repository.load_all_definitions()
    assert names_of(definitions) == []
    assert repository.get_sensor_def("t_lag").name == "t_lag"


def test_definitions_have_the_tables_of_the_list(lake: Lake) -> None:
    store(lake, A, B, TableName("x", "tmp_1"), refused=TableName("x", "refused"))
    with refresh_at_load():
        # The source is down, so the newest stored list applies.
        definitions = build(lake)
    assert names_of(definitions) == [B, A]
    keys = {tuple(key.path) for key in definitions.resolve_all_asset_keys()}
    assert ("t", "scd2", "public", "a") in keys
    assert ("t", "scd1", "a.b", "B~20~~22~c~22~~2f~d") in keys
    own = find_captures(definitions)[NAME].capture
    assert own.selection == CAPTURE.selection
    assert own.own_settings == CAPTURE.tables


def test_definitions_load_without_the_connection_string(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A web server, or a validation in CI, does not have the source's secret."""
    monkeypatch.delenv("PGCDC_TEST_NO_DSN", raising=False)
    store(lake, A)
    definitions = build_cdc_definitions(
        CAPTURE,
        postgres=PostgresResource(capture=NAME, conninfo=dg.EnvVar("PGCDC_TEST_NO_DSN")),
        lake=LakeResource(uri=lake.uri),
    )
    keys = {tuple(key.path) for key in definitions.resolve_all_asset_keys()}
    assert ("t", "scd2", "public", "a") in keys


def test_all_processes_of_a_run_have_the_same_tables(lake: Lake) -> None:
    store(lake, A)
    with loading(DefinitionsLoadType.INITIALIZATION) as context:
        server = build(lake)
        pending = dict(context.get_pending_reconstruction_metadata())
        data = server.get_repository_def().repository_load_data
    assert data is not None
    assert data.reconstruction_metadata == pending
    store(lake, A, B)
    with loading(DefinitionsLoadType.RECONSTRUCTION, pending) as context:
        run = build(lake)
        # A step of the run may be executed in another process.
        assert context.get_pending_reconstruction_metadata() == pending
    assert names_of(run) == names_of(server) == [A]
    assert names_of(build(lake)) == [B, A]
