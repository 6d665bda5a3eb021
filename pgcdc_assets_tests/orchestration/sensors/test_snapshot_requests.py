"""The runs that copy tables: first snapshots, and re-snapshots with their events."""

from __future__ import annotations

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.orchestration.sensors.snapshot_requests import (
    EVENT_TAG,
    REASON_TAG,
    TABLES_TAG,
    SnapshotNeeds,
)
from pgcdc_assets.raw.relations.schema_events import STREAM, SchemaChange, SchemaEvent
from pgcdc_assets.table_name import TableName
from pgcdc_assets.tables.schema_gate import SchemaGate

ORDER = ["s.a", "s.b", "s.c", "s.d"]


def _gate(
    table: str, *lsns: int, policy: str = "follow", detail: str = "It changed."
) -> SchemaGate:
    return SchemaGate(
        policy,
        tuple(
            SchemaEvent(
                1,
                Lsn(lsn),
                TableName("s", table),
                7,
                SchemaChange.TYPE_CHANGED,
                ("v",),
                detail,
                True,
                STREAM,
            )
            for lsn in lsns
        ),
    )


def test_first_snapshots_have_the_tags_of_earlier_releases() -> None:
    (all_tables,) = SnapshotNeeds(ORDER, ORDER).plan()
    assert all_tables.tags == {TABLES_TAG: "s.a..s.d"}
    assert (all_tables.key, all_tables.reason_tags) == ("s.a:s.d", {})


def test_adjacent_tables_share_a_run_that_names_the_newest_event_and_each_reason() -> None:
    gates = {"s.a": _gate("a", 16, 32), "s.b": _gate("b", 24), "s.d": _gate("d", 8)}
    pair, single = SnapshotNeeds(ORDER, [], gates).plan()
    assert (pair.first, pair.last) == ("s.a", "s.b")
    assert pair.tags == {TABLES_TAG: "s.a..s.b", EVENT_TAG: "0001-0000000000000020"}
    assert pair.key.endswith(pair.tags[EVENT_TAG])
    assert pair.reason == (
        "s.a: type_changed (v) at 0/10: It changed. type_changed (v) at 0/20: It changed.; "
        "s.b: type_changed (v) at 0/18: It changed."
    )
    assert single.tags[EVENT_TAG] == "0001-0000000000000008"


def test_attempts_for_a_new_event_begin_at_zero() -> None:
    first, second = (
        SnapshotNeeds(ORDER, [], {"s.a": _gate("a", *lsns)}).plan()[0] for lsns in ((8,), (8, 16))
    )
    assert first.tags != second.tags


def test_a_table_without_a_snapshot_is_requested_once() -> None:
    copies = SnapshotNeeds(ORDER, ["s.b"], {"s.b": _gate("b", 8), "s.c": _gate("c", 8)}).plan()
    assert [(c.first, c.last, bool(c.event)) for c in copies] == [
        ("s.b", "s.b", False),
        ("s.c", "s.c", True),
    ]


def test_a_table_that_waits_for_a_person_is_not_requested() -> None:
    gates = {"s.a": _gate("a", 8, policy="ask"), "s.b": _gate("b", 8, policy="stop")}
    assert SnapshotNeeds(ORDER, [], gates).plan() == []


def test_the_tag_has_the_beginning_of_a_long_reason() -> None:
    (copy,) = SnapshotNeeds(ORDER, [], {"s.a": _gate("a", 8, detail="x" * 5000)}).plan()
    assert len(copy.reason_tags[REASON_TAG]) == 400
    assert len(copy.reason) > 5000
