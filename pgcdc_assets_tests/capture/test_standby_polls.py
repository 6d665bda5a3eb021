"""Looks at the catalog of a standby: a replayed row of the catalog has no number of its command."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pgcdc_assets.capture.snapshots.run import snapshot_tables
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.capture.test_schema_watch import poll, shown
from pgcdc_assets_tests.support.captures import Capturing
from pgcdc_assets_tests.support.standby import Source

pytestmark = [pytest.mark.postgres, pytest.mark.slow, pytest.mark.every_pg(since=16)]

# Transactions of the primary, and the events of the next poll of the standby.
_CHANGES = [
    (["create table later partition of root for values from (10) to (20)"],
     ["root partition_attached"]),
    (["create table filled (like root); insert into filled values (21, 'x');"
      "alter table root attach partition filled for values from (20) to (30)"],
     ["root partition_attached!"]),
    (["truncate low; insert into root values (3, 'y')", "analyze low"],
     ["root partition_truncated!"]),
    (["alter table t alter m type int using m * 2"], ["t table_rewritten!"]),
    (["alter table t alter v type varchar(20), alter m type int using m * 2"],
     ["t table_rewritten!", "t type_widened v", "t values_uncertain v"]),
]  # fmt: skip


def test_changes_without_the_numbers_of_commands_are_found(source: Source, zone: RawZone) -> None:
    """E4, E5, F3: without the numbers, a change that may have moved rows needs a snapshot."""
    if int(source.primary.value("show server_version_num")) < 160000:
        pytest.skip("a standby decodes from Postgres 16 on")
    primary = source.primary
    primary.execute(
        "create table root (id int, v text) partition by range (id);"
        "create table low partition of root for values from (0) to (10);"
        "create table t (id int primary key, v varchar(10)); insert into t values (1, 'a');"
        "alter table t add m int default 7;"
        "create publication pub for table root, t with (publish_via_partition_root = true)"
    )
    source.wait_for_replay()
    slot = f"s_{source.standby.name}"
    capturing = Capturing(source.standby, zone, slot, source.standby.conninfo)
    settings = replace(source.standby.settings(), primary=primary.settings())
    tables = [TableName("public", "root"), TableName("public", "t")]
    with source.standby_setting("hot_standby_feedback", "on"):
        snapshot_tables(settings, zone, slot, "pub", tables)
        poll(capturing)
        for statements, events in _CHANGES:
            for statement in statements:
                primary.execute(statement)
            source.wait_for_replay()
            assert shown(poll(capturing)) == events, statements
    source.standby.drop_slots()
