"""The options of a slot and of its stream, in the syntax of each version of Postgres."""

from __future__ import annotations

import pytest

from pgcdc_assets.capture.epoch import renew_epoch
from pgcdc_assets.capture.limits import CaptureLimits
from pgcdc_assets.capture.snapshots.run import snapshot_tables
from pgcdc_assets.errors import ConfigurationError, SlotTaken
from pgcdc_assets.postgres.connection import query_connection
from pgcdc_assets.postgres.heartbeat import create_table_sql
from pgcdc_assets.postgres.preflight.options import examine_options, examine_subscribed_tables
from pgcdc_assets.postgres.slots.creation import SlotOptions, create_slot
from pgcdc_assets.postgres.slots.status import SlotStatus, read_slot_status
from pgcdc_assets.postgres.stream.plugin_options import Origin, PluginOptions
from pgcdc_assets.postgres.stream.request import StreamSettings
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings.policies import HeartbeatPolicy, SlotPolicy, StreamPolicy
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.support.captures import Capturing
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = pytest.mark.postgres

FAILOVER = SlotPolicy(failover=True)


def _status(database: Database, slot: str) -> SlotStatus | None:
    with query_connection(database.settings(), "test") as conn:
        return read_slot_status(conn, slot)


@pytest.mark.every_pg
@pytest.mark.parametrize("two_phase", [False, True])
@pytest.mark.parametrize("temporary", [False, True])
@pytest.mark.parametrize("exports", [False, True])
def test_each_version_creates_slots_with_each_option(
    database: Database, two_phase: bool, temporary: bool, exports: bool
) -> None:
    slot = f"s_{database.name}"
    options = SlotOptions(temporary=temporary, two_phase=two_phase, exports_snapshot=exports)
    if two_phase and database.server.version < 15:
        with (
            pytest.raises(ConfigurationError, match="two_phase` requires Postgres 15"),
            create_slot(database.settings(), slot, options=options),
        ):
            pass
        return
    with create_slot(database.settings(), slot, options=options) as made:
        assert bool(made.snapshot_name) == exports
        status = _status(database, slot)
        assert status is not None
        assert (status.two_phase, status.temporary) == (two_phase, temporary)
        assert not status.has_failover
        assert status.confirmed_flush_lsn == made.consistent_point
    if temporary:
        # The server drops the slot at the end of its walsender, which the client does not await.
        wait_until(lambda: _status(database, slot) is None, "the end of the temporary slot")
    else:
        assert _status(database, slot) is not None


@pytest.mark.every_pg
def test_failover_is_set_at_the_creation_and_at_the_next_stream(
    database: Database, capturing: Capturing
) -> None:
    slot, settings = f"x_{database.name}", database.settings()
    options = SlotOptions(failover=True, two_phase=True)
    database.execute("create table t (id int primary key)")
    database.execute("create publication pub for table t")
    limits = CaptureLimits(failover=True)
    if database.server.version < 17:
        with (
            pytest.raises(ConfigurationError, match=r"requires Postgres 17.*failover to false"),
            create_slot(settings, slot, options=options),
        ):
            pass
        with pytest.raises(ConfigurationError, match="requires Postgres 17"):
            snapshot_tables(settings, capturing.zone, slot, "pub", slot_policy=FAILOVER)
        assert _status(database, slot) is None
        assert capturing.zone.epochs.latest() is None
        return
    snapshot_tables(settings, capturing.zone, capturing.slot, "pub", slot_policy=FAILOVER)
    assert capturing.status().has_failover
    capturing.capture(limits=limits)
    database.execute("select pg_drop_replication_slot(%s)", (capturing.slot,))
    renew_epoch(settings, capturing.zone, capturing.slot, "pub", slot_policy=FAILOVER)
    assert capturing.status().has_failover
    with create_slot(settings, slot, options=options):
        status = _status(database, slot)
        assert status is not None and status.has_failover and status.two_phase


@pytest.mark.every_pg
def test_an_existing_slot_gets_failover(capturing: Capturing) -> None:
    capturing.begin("create table t (id int)")
    limits = CaptureLimits(failover=True)
    if capturing.database.server.version < 17:
        with pytest.raises(ConfigurationError, match="requires Postgres 17"):
            capturing.capture(limits=limits)
        return
    assert not capturing.status().has_failover
    capturing.database.execute("insert into t values (1)")
    capturing.capture(limits=limits)
    assert capturing.status().has_failover
    # Without the setting, the slot is left as it is.
    capturing.capture()
    assert capturing.status().has_failover
    assert capturing.texts("t") == [["1"]]


@pytest.mark.every_pg
def test_changes_with_an_origin_are_left_out_on_request(capturing: Capturing) -> None:
    """A cluster that is also written to by replication makes no loop."""
    capturing.begin("create table t (id int)")
    database, name = capturing.database, f"o_{capturing.slot}"
    database.execute("select pg_replication_origin_create(%s)", (name,))
    plugin = PluginOptions(origin=Origin.NONE)
    limits = CaptureLimits(stream=StreamSettings(plugin=plugin))
    try:

        def commit(number: int) -> None:
            database.transaction(
                f"select pg_replication_origin_session_setup('{name}')",
                f"insert into t values ({number})",
            )
            database.execute("insert into t values (%s)", (number + 1,))

        commit(1)
        if database.server.version < 16:
            with pytest.raises(ConfigurationError, match=r"origin: none.*requires Postgres 16"):
                capturing.capture(limits=limits)
            capturing.capture()
            assert capturing.texts("t") == [["1"], ["2"]]
            return
        capturing.capture(limits=limits)
        assert capturing.texts("t") == [["2"]]
        commit(3)
        capturing.capture()
        assert capturing.texts("t") == [["2"], ["3"], ["4"]]
    finally:
        database.execute("select pg_replication_origin_drop(%s)", (name,))


@pytest.mark.every_pg
def test_the_preflight_names_options_that_the_server_lacks(database: Database) -> None:
    stream = StreamPolicy(streaming="parallel", origin="none")
    with query_connection(database.settings(), "test") as conn:
        found = {each.code: each for each in examine_options(conn, FAILOVER, stream)}
        assert list(examine_options(conn, SlotPolicy(), StreamPolicy(streaming="on"))) == []
    version = database.server.version
    errors = {code for code, finding in found.items() if finding.severity == "error"}
    old = {"streaming", "origin"} if version < 16 else set()
    assert errors == old | ({"failover"} if version < 17 else set())
    if version >= 17:
        assert "synchronized_standby_slots" in str(found["failover"])


@pytest.mark.every_pg
def test_the_preflight_names_tables_whose_replicated_changes_are_left_out(
    database: Database,
) -> None:
    """A subscription fills the partition of one table, and another table."""
    name = f"sub_{database.name}"
    database.execute(
        "create table t (id int primary key); create table own (id int primary key);"
        "create table root (id int primary key) partition by range (id);"
        "create table leaf partition of root for values from (0) to (9);"
        "create publication theirs for table t, leaf;"
        "create publication pub for table t, own, root with (publish_via_partition_root = true)"
    )
    options = "enabled = false, create_slot = false, slot_name = none"
    database.execute(
        f"create subscription {name} connection %s publication theirs with ({options})",
        (database.conninfo,),
    )
    try:
        with query_connection(database.settings(), "test") as conn:
            found = list(examine_subscribed_tables(conn, "pub", StreamPolicy(origin="none")))
            assert list(examine_subscribed_tables(conn, "pub", StreamPolicy())) == []
    finally:
        database.execute(f"drop subscription {name}")
    (finding,) = found
    assert (finding.code, finding.severity) == ("origin", "warning")
    assert "replicates into public.root, public.t, and" in finding.message


def test_a_first_snapshot_is_refused_by_the_name_of_the_slots_owner(
    database: Database, zone: RawZone, tmp_path: object
) -> None:
    table, slot = TableName("public", "heartbeats"), f"s_{database.name}"
    policy = SlotPolicy(heartbeat=HeartbeatPolicy(table=str(table)))
    database.execute("create table t (id int primary key); create publication pub for table t")
    database.execute(create_table_sql(table))
    settings = database.settings()
    snapshot_tables(settings, zone, slot, "pub", slot_policy=policy)
    other = RawZone(Lake(f"{tmp_path}/other"), "test")
    with pytest.raises(SlotTaken, match="pgcdc sync --name test --adopt-slot") as caught:
        snapshot_tables(settings, other, slot, "pub", slot_policy=policy)
    assert f"capture test of lake {zone.lake.path('test')} (epoch 1" in str(caught.value)
    assert other.epochs.latest() is None
    # The row of a slot that does not exist is obsolete.
    database.execute("select pg_drop_replication_slot(%s)", (slot,))
    snapshot_tables(settings, other, slot, "pub", slot_policy=policy)
    assert database.value("select lake from heartbeats") == other.lake.path("test")
    # The first lake cannot drop the slot of its new owner.
    with pytest.raises(SlotTaken, match=r"other/test.*pgcdc renew --name test --adopt-slot"):
        renew_epoch(settings, zone, slot, "pub", slot_policy=policy)
    adopted = renew_epoch(settings, zone, slot, "pub", slot_policy=policy, adopt_slot=True)
    assert adopted.epoch == 2
    assert database.query("select lake, epoch from heartbeats") == [(zone.lake.path("test"), 2)]
    # A table that cannot be written delays nothing.
    database.execute("drop table heartbeats; select pg_drop_replication_slot(%s)", (slot,))
    assert renew_epoch(settings, zone, slot, "pub", slot_policy=policy).epoch == 3
