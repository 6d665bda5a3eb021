"""A slot with two_phase is recognised at once, and adopted only without a loss."""

from __future__ import annotations

import pytest

from pgcdc_assets.capture.epoch import renew_epoch
from pgcdc_assets.capture.snapshots.run import snapshot_tables
from pgcdc_assets.cli.check import examine_capture
from pgcdc_assets.errors import ConfigurationError, SlotAdvanced
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets.settings.policies import SlotPolicy, StreamPolicy
from pgcdc_assets_tests.support.captures import Capturing
from pgcdc_assets_tests.support.prepared import capture

pytestmark = pytest.mark.postgres


@pytest.fixture
def adopting(capturing: Capturing) -> Capturing:
    """Return a capture whose slot was created with two_phase by hand."""
    if int(capturing.database.value("show server_version_num")) < 150000:
        pytest.skip("two_phase requires Postgres 15")
    capturing.database.execute(
        "create table t (id int primary key); create publication pub for table t"
    )
    _make(capturing)
    return capturing


def _make(capturing: Capturing) -> None:
    capturing.database.execute(
        "select pg_create_logical_replication_slot(%s, 'pgoutput', false, true)", (capturing.slot,)
    )


def _copy(capturing: Capturing, *, two_phase: bool, adopt_slot: bool = False) -> None:
    snapshot_tables(
        capturing.settings,
        capturing.zone,
        capturing.slot,
        "pub",
        slot_policy=SlotPolicy(two_phase=two_phase),
        adopt_slot=adopt_slot,
    )


def _errors(capturing: Capturing, *, two_phase: bool) -> list[str]:
    declared = CdcCapture(
        "test",
        "pub",
        (CdcTable("public", "t"),),
        slot=capturing.slot,
        stream=StreamPolicy(two_phase=two_phase),
    )
    findings = examine_capture(capturing.settings, declared, capturing.zone)
    return [str(finding) for finding in findings if finding.severity == "error"]


@pytest.mark.every_pg
def test_without_the_setting_the_slot_is_refused_with_the_setting(adopting: Capturing) -> None:
    with pytest.raises(ConfigurationError, match=r"Set `stream\.two_phase: true`") as caught:
        _copy(adopting, two_phase=False)
    assert caught.value.exit_status == 2
    assert adopting.zone.epochs.latest() is None
    [error] = _errors(adopting, two_phase=False)
    assert "stream.two_phase: true" in error
    assert _errors(adopting, two_phase=True) == []

    # The remedy in the error works.
    adopting.database.prepare("early", "insert into t values (1)", end="commit")
    _copy(adopting, two_phase=True)
    adopting.database.prepare("late", "insert into t values (2)")
    capture(adopting)
    adopting.database.end_prepared("late")
    # The slot keeps two_phase: a capture without the setting continues.
    adopting.capture()
    assert adopting.texts("t") == [["1"], ["2"]]
    assert _errors(adopting, two_phase=False) == []
    # A renewal would lose the changes that the slot holds.
    with pytest.raises(ConfigurationError, match="can continue"):
        renew_epoch(adopting.settings, adopting.zone, adopting.slot, "pub")


def test_a_transaction_of_another_reader_must_end_before_the_adoption(adopting: Capturing) -> None:
    adopting.database.prepare("foreign", "insert into t values (1)")
    adopting.database.query(
        "select count(*) from pg_logical_slot_get_binary_changes(%s, null, null, "
        "'proto_version', '3', 'publication_names', 'pub', 'two_phase', 'on')",
        (adopting.slot,),
    )
    with pytest.raises(ConfigurationError, match="'foreign'"):
        _copy(adopting, two_phase=True, adopt_slot=True)
    assert adopting.zone.epochs.latest() is None
    adopting.database.end_prepared("foreign")
    _copy(adopting, two_phase=True, adopt_slot=True)
    capture(adopting)
    assert adopting.texts("t") == []
    [snapshot] = adopting.zone.snapshots.complete_snapshots()
    assert snapshot.row_count == 1


def test_a_slot_that_was_recreated_with_two_phase_stops_the_capture(capturing: Capturing) -> None:
    capturing.begin_with_one_insert()
    capturing.capture()
    capturing.database.execute("select pg_drop_replication_slot(%s)", (capturing.slot,))
    _make(capturing)
    capturing.database.execute("insert into t values (2)")
    with pytest.raises(SlotAdvanced):
        capturing.capture()
    assert renew_epoch(capturing.settings, capturing.zone, capturing.slot, "pub").epoch == 2


def test_two_phase_that_another_program_switched_on_is_an_error(capturing: Capturing) -> None:
    """The server does not send the rows of a transaction that was prepared before."""
    if int(capturing.database.value("show server_version_num")) < 180000:
        pytest.skip("ALTER_REPLICATION_SLOT has two_phase from Postgres 18 on")
    capturing.begin("create table t (id int primary key)")
    capturing.capture()
    capturing.database.prepare("g", "insert into t values (1)")
    capturing.capture()
    capturing.database.replication_command(
        f"ALTER_REPLICATION_SLOT {capturing.slot} (TWO_PHASE true)"
    )
    with pytest.raises(ConfigurationError, match=r"switched on two_phase.*pgcdc renew"):
        capturing.capture()
    # The creation of a slot waits for the end of the transaction.
    capturing.database.end_prepared("g")
    assert renew_epoch(capturing.settings, capturing.zone, capturing.slot, "pub").epoch == 2
