"""Which stored transactions have ended, and the texts of their relations."""

from __future__ import annotations

from typing import Any

import pytest

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.raw.delta.table import RawTable
from pgcdc_assets.raw.prepared_rows import parse_streamed_relation
from pgcdc_assets.raw.zone import RawZone


def test_a_maintenance_that_knows_an_earlier_epoch_removes_nothing_of_the_next(
    zone: RawZone,
) -> None:
    """`pgcdc renew` and a capture may run between its look at the epochs and the removal."""
    for epoch, gid in ((1, "first"), (2, "second")):
        zone.prepared.begin(epoch, Lsn(100 * epoch), [(700 + epoch, gid)])
    assert zone.prepared.remove_ended(1, Lsn(1000)) == 0
    assert [each.key.gid for each in zone.prepared.unfinished(2, Lsn(1000))] == ["second"]
    assert zone.prepared.remove_ended(2, Lsn(1000)) == 1
    assert [each.key.gid for each in zone.prepared.unfinished(2, Lsn(1000))] == ["second"]
    assert zone.prepared.unfinished(1, Lsn(1000)) == []


def test_a_landing_beside_a_maintenance_stores_its_transactions(
    zone: RawZone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The maintenance removes ended transactions between the landing's look and its commit."""
    zone.prepared.begin(1, Lsn(100), [(701, "ended")])
    commit = RawTable.commit

    def commit_late(table: RawTable, *arguments: Any, **named: Any) -> None:
        monkeypatch.setattr(RawTable, "commit", commit)
        assert RawZone(zone.lake, zone.name).prepared.remove_ended(2, Lsn(1000)) == 1
        commit(table, *arguments, **named)

    monkeypatch.setattr(RawTable, "commit", commit_late)
    zone.prepared.begin(2, Lsn(200), [(702, "open")])
    assert [each.key.gid for each in zone.prepared.unfinished(2, Lsn(1000))] == ["open"]
    assert zone.prepared.unfinished(1, Lsn(1000)) == []
    assert zone.prepared.two_phase_from(2) == Lsn(200)


def test_a_relation_that_an_early_release_stored_is_read() -> None:
    """Early releases stored the relations of rows only, without who announced them."""
    text = (
        '{"index": 3, "version": 2, "relation_id": 7, "schema": "public", "table": "t", '
        '"replica_identity": "d", "columns": [["id", 23, -1, true]]}'
    )
    index, announced = parse_streamed_relation(text, 701)
    assert (index, announced.xid, announced.version) == (3, 0, 2)
    assert announced.relation.qualified_name == "public.t"
    own = text.replace("{", '{"is_own": true, "is_for_row": false, ')
    _, announced = parse_streamed_relation(own, 701)
    assert (announced.xid, announced.is_for_row) == (701, False)
