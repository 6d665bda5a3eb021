"""Invariants of SCD tables: random histories satisfy them, and every violation is found.

The tables are merged once. A test copies the tables, plants one error with delta-rs, and checks the
rows of the last merge and the whole tables.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from pgcdc_assets.errors import ConfigurationError, TransientError
from pgcdc_assets.lsn import Lsn, Position
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.tables.properties import key_text, parse_key
from pgcdc_assets.verify import Findings, Rule, check_all, check_merged
from pgcdc_assets_tests.support.merge.history import (
    Landing,
    column,
    delete,
    insert,
    relation,
    truncate,
    update,
)
from pgcdc_assets_tests.support.merge.one_table import drop_epochs
from pgcdc_assets_tests.support.merge.random_history import RandomHistory, cut, random_relation
from pgcdc_assets_tests.support.verify.merged_tables import BOTH, HISTORY, IMAGE, Merged
from pgcdc_assets_tests.support.verify.plants import (
    PLANTS,
    Plant,
    row_too_few,
    same_key_on_rows_not_touched,
)

pytestmark = [pytest.mark.spark, pytest.mark.slow]

BY_LSN = {Rule.OVERLAPPING, Rule.REVERSED, Rule.UNEXPLAINED_ENDS}
BETWEEN = {Rule.NOT_IN_SCD1, Rule.ROW_COUNTS}
RULES = {
    1: {Rule.DUPLICATE_KEYS},
    2: BY_LSN | BETWEEN | {Rule.SEVERAL_CURRENT, Rule.WRONG_FLAG},
}


def broken(findings: Findings) -> dict[Rule, int]:
    found = {rule: count for rule, count in findings.violations.items() if count}
    assert findings.is_sound == (not found)
    return found


@pytest.fixture(scope="module")
def session(spark: SparkSession) -> Iterator[SparkSession]:
    from pgcdc_assets.spark.session import own_sessions

    with own_sessions(spark, 1) as (session,):
        yield session


def random_tables(
    session: SparkSession, folder: Path, seed: int | str, identity: str, table: CdcTable, runs: int
) -> Merged:
    """Merge a random history into both kinds of table, and check the rows of each run.

    The second to last run has a TRUNCATE.
    """
    rng = random.Random(seed)
    history = RandomHistory(rng, identity, histories=80)
    landing = Landing(RawZone(Lake(str(folder)), "test"), [random_relation(identity)])
    landing.begin(history.copied())
    merged = Merged(session, landing)
    for run, transactions in enumerate(cut(rng, 9, runs)):
        for number in transactions:
            empties = run == runs - 2 and number == transactions[0]
            landing.land(history.transaction(truncates=empties))
        merged.merge(table)
        if run:
            for scd in (1, 2):
                assert_kept(merged.check_merged(scd, table))
    for scd in (1, 2):
        assert_kept(merged.check_all(scd, table))
    return merged


def assert_kept(found: Findings) -> None:
    assert set(found.violations) == RULES[found.scd]
    assert not found.not_judged
    assert not broken(found)
    assert found.row_count > 0


@pytest.fixture(scope="module")
def original(session: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Merged:
    # The seed is fixed, because the planted errors need certain rows.
    folder = tmp_path_factory.mktemp("merged") / "lake"
    return random_tables(session, folder, "invariants d", "d", BOTH, 2)


@contextmanager
def restored_after(tables: Merged, *scd: int) -> Iterator[Merged]:
    """Restore the shared tables after each test."""
    versions = {tables.path(kind): DeltaTable(tables.path(kind)).version() for kind in scd}
    yield tables
    for path, version in versions.items():
        if DeltaTable(path).version() > version:
            DeltaTable(path).restore(version)


@pytest.fixture
def shared(original: Merged) -> Iterator[Merged]:
    with restored_after(original, 1, 2) as tables:
        yield tables


@pytest.fixture
def tables(original: Merged, tmp_path: Path) -> Merged:
    """Create tables for one test."""
    return original.copied(tmp_path / "lake")


@pytest.mark.soak
def test_random_histories_satisfy_every_rule(original: Merged) -> None:
    part, whole = original.check_merged(2, BOTH), original.check_all(2, BOTH)
    assert part.row_count < whole.row_count
    assert (part.since, whole.since) == (original.since[1], None)


@pytest.mark.soak
def test_histories_with_full_identity_and_tracked_columns_satisfy_every_rule(
    session: SparkSession, tmp_path: Path, seed: int
) -> None:
    tracked = replace(BOTH, tracked=("doc", "number"))
    random_tables(session, tmp_path / "lake", seed, "f", tracked, 3)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("plant", "rule", "table"),
    [
        pytest.param(plant, rule, table, id=plant.__name__)
        for plants, table in PLANTS
        for plant, rule in plants.items()
    ],
)
def test_a_violation_is_found_by_exactly_its_rule(
    shared: Merged, plant: Plant, rule: Rule, table: CdcTable
) -> None:
    plant(shared, "true", int(shared.since[1]))
    assert broken(shared.check_all(table.scd[-1], table)) == {rule: 1}


@pytest.mark.sampled
@pytest.mark.parametrize(("plants", "table"), PLANTS, ids=["scd1", "scd2", "both"])
def test_a_violation_is_found_after_the_merge_that_causes_it(
    shared: Merged, plants: dict[Plant, Rule], table: CdcTable
) -> None:
    for number, plant in enumerate(plants):
        plant(shared, f"history % {len(plants)} = {number}", int(shared.since[1]))
    assert broken(shared.check_merged(table.scd[-1], table)) == Counter(plants.values())


@pytest.mark.sampled
def test_a_missing_row_is_found_by_the_row_counts(shared: Merged) -> None:
    row_too_few(shared, "true", int(shared.since[1]))
    assert broken(shared.check_merged(2, BOTH)) == {Rule.ROW_COUNTS: 1}
    assert broken(shared.check_all(2, BOTH)) == dict.fromkeys(BETWEEN, 1)


@pytest.mark.sampled
def test_unchanged_rows_are_checked_on_demand_or_in_a_small_table(
    shared: Merged,
) -> None:
    same_key_on_rows_not_touched(shared, "true", int(shared.since[1]))
    assert not broken(shared.check_merged(1, IMAGE))
    small = check_merged(shared.session, shared.zone, IMAGE, 1, shared.since)
    for found in (small, shared.check_all(1, IMAGE)):
        assert broken(found) == {Rule.DUPLICATE_KEYS: 1}
        assert found.since is None


@pytest.mark.sampled
def test_after_a_merge_files_without_its_keys_are_not_opened(tables: Merged) -> None:
    since = int(tables.since[1])
    before = {scd: set(DeltaTable(tables.path(scd)).file_uris()) for scd in (1, 2)}
    tables.add(1, tables.one(1, "true"), history=5000, _lsn=since - 1)
    past = {"history": 5000, "_valid_from_lsn": since - 2}
    tables.add(2, tables.one(2, "_is_current"), **past)
    tables.add(2, tables.one(2, "not _is_current"), **past, _valid_to_lsn=since - 1)
    for scd in (1, 2):
        for added in set(DeltaTable(tables.path(scd)).file_uris()) - before[scd]:
            Path(added).unlink()
        assert not broken(tables.check_merged(scd, HISTORY))
        with pytest.raises(TransientError, match="not checked"):
            tables.check_all(scd, HISTORY)


@pytest.mark.sampled
def test_tables_at_different_watermarks_are_compared_at_a_common_version(tables: Merged) -> None:
    tables.landing.land([insert("7000", "1", "a", "1.00", "x")])
    tables.merge(HISTORY)
    part, whole = tables.check_merged(2, BOTH), tables.check_all(2, BOTH)
    assert not broken(part) and not broken(whole)
    assert set(part.not_judged) == BETWEEN
    assert "merged through" in part.not_judged[Rule.ROW_COUNTS]
    assert set(whole.violations) == RULES[2]


@pytest.mark.sampled
def test_a_table_without_a_key_has_no_rules_to_check(session: SparkSession, zone: RawZone) -> None:
    landing = Landing(zone, [relation(column("id"), key=(), identity="f")])
    landing.begin([("1",), ("1",)])
    landing.land()
    tables = Merged(session, landing)
    tables.merge(IMAGE)
    found = tables.check_all(1, IMAGE)
    assert (found.has_key, found.is_sound, found.row_count) == (False, True, 0)


@pytest.mark.sampled
def test_a_table_that_was_never_merged_is_an_error(original: Merged) -> None:
    with pytest.raises(ConfigurationError, match="never merged"):
        check_all(original.session, original.zone, CdcTable("shop", "nope"), 1)


DAYS = tuple(f"2024-01-0{day}" for day in range(1, 5))


@pytest.fixture(scope="module")
def full_tables(session: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Merged:
    """Merge a delete, an update and a key change with REPLICA IDENTITY FULL."""
    zone = RawZone(Lake(str(tmp_path_factory.mktemp("full") / "lake")), "test")
    columns = (column("id", "date"), column("v", "text"))
    landing = Landing(zone, [relation(*columns, identity="f")])
    landing.begin([(day, "a") for day in ("infinity", "-infinity", *DAYS)])
    landing.land()
    landing.land(
        [delete(DAYS[0], "a", old_kind="O")],
        [update(DAYS[1], "b", old=(DAYS[1], "a"), old_kind="O")],
        [update("0044-03-15 BC", "a", old=(DAYS[2], "a"), old_kind="O")],
    )
    merged = Merged(session, landing)
    merged.merge(HISTORY)
    merged.since = Position(1, Lsn(landing.lsn - 0x30))
    return merged


@pytest.fixture
def shared_full(full_tables: Merged) -> Iterator[Merged]:
    with restored_after(full_tables, 2) as tables:
        yield tables


@pytest.mark.sampled
def test_keys_that_their_type_cannot_hold_are_distinguished(full_tables: Merged) -> None:
    assert not broken(full_tables.check_merged(2, HISTORY))
    assert not broken(full_tables.check_all(2, HISTORY))


@pytest.mark.sampled
@pytest.mark.parametrize("transaction", range(3), ids=["delete", "update", "key change"])
def test_each_end_needs_another_change_that_removes_a_key(
    shared_full: Merged, transaction: int
) -> None:
    lsn = int(shared_full.since[1]) + 0x10 * transaction
    DeltaTable(shared_full.path(2)).update(
        predicate=f"id = '{DAYS[3]}'",
        updates={
            "_valid_to": "_valid_from",
            "_valid_to_lsn": f"cast({lsn} as bigint)",
            "_is_current": "false",
        },
    )
    assert broken(shared_full.check_merged(2, HISTORY)) == {Rule.UNEXPLAINED_ENDS: 1}


@pytest.mark.sampled
def test_a_lost_version_leaves_an_unexplained_end(shared_full: Merged) -> None:
    DeltaTable(shared_full.path(2)).delete("v = 'b'")
    assert broken(shared_full.check_merged(2, HISTORY)) == {Rule.UNEXPLAINED_ENDS: 1}
    assert broken(shared_full.check_all(2, HISTORY)) == {Rule.UNEXPLAINED_ENDS: 1}


@pytest.mark.sampled
def test_a_truncate_and_a_snapshot_end_any_number_of_versions(
    full_tables: Merged, tmp_path: Path
) -> None:
    tables = full_tables.copied(tmp_path / "lake")
    landing = tables.landing
    landing.land([truncate(), insert(DAYS[0], "c"), insert(DAYS[1], "c"), insert(DAYS[2], "c")])
    landing.copy([(DAYS[2], "c")])
    tables.merge(HISTORY)
    assert not broken(tables.check_merged(2, HISTORY))
    assert not broken(tables.check_all(2, HISTORY))


@pytest.mark.sampled
def test_stored_epochs_give_the_order_if_an_epoch_begins_at_a_lower_lsn(
    session: SparkSession, zone: RawZone
) -> None:
    landing = Landing(zone, [relation(column("id"), column("v", "text"))], lsn=0x5000)
    tables = Merged(session, landing)
    landing.begin([("1", "a"), ("2", "a")])
    landing.land()
    tables.merge(HISTORY)
    landing.epoch, landing.lsn = 2, 0x1000
    landing.begin([("1", "b"), ("3", "a")])
    landing.land()
    tables.merge(HISTORY)
    tables.since = Position(2, Lsn(0x1000))
    for found in (tables.check_merged(2, HISTORY), tables.check_all(2, HISTORY)):
        assert set(found.not_judged) == {Rule.UNEXPLAINED_ENDS}
        assert not broken(found)
    ended = tables.one(2, "id = 1 and not _is_current")
    tables.change(2, ended, _valid_to_lsn="_valid_to_lsn + 1")
    assert broken(tables.check_all(2, HISTORY)) == {Rule.OVERLAPPING: 1}
    drop_epochs(session, tables.path(2))
    found = tables.check_all(2, HISTORY)
    assert set(found.not_judged) == BY_LSN
    assert set(found.violations) == {Rule.SEVERAL_CURRENT, Rule.WRONG_FLAG}


@pytest.mark.sampled
def test_soft_deleted_rows_are_not_compared(session: SparkSession, zone: RawZone) -> None:
    landing = Landing(zone, [relation(column("id"), column("v", "text"))])
    tables = Merged(session, landing)
    landing.begin()
    landing.land([insert("1", "a"), insert("2", "a")], [update("1", "b"), delete("2", None)])
    soft = replace(BOTH, soft_deletes=True)
    tables.merge(soft)
    assert not broken(tables.check_merged(2, soft))
    assert not broken(tables.check_all(2, soft))
    DeltaTable(tables.path(1)).update(predicate="id = 2", updates={"_deleted": "false"})
    assert broken(tables.check_all(2, soft)) == {Rule.ROW_COUNTS: 1}


@pytest.mark.sampled
def test_soft_deleted_rows_are_not_compared_if_the_history_has_a_column_of_that_name(
    session: SparkSession, zone: RawZone
) -> None:
    """The source has dropped its column `_deleted`, which the history has kept."""
    marked = relation(column("id"), column("_deleted", "bool", attnum=2))
    landing = Landing(zone, [marked, relation(column("id"))])
    tables = Merged(session, landing)
    landing.begin()
    landing.land([insert("1", "t"), insert("2", "f")])
    tables.merge(HISTORY)
    landing.copy([("1",), ("2",)], version=2)
    landing.land([insert("3", version=2)], [delete("2", version=2)])
    soft = replace(BOTH, soft_deletes=True)
    tables.merge(replace(soft, scd=(1,)))
    tables.merge(HISTORY)
    assert not broken(tables.check_all(2, soft))
    DeltaTable(tables.path(1)).update(predicate="id = 2", updates={"_deleted": "false"})
    assert broken(tables.check_all(2, soft)) == {Rule.ROW_COUNTS: 1}


@pytest.mark.sampled
def test_entries_of_a_dropped_column_are_not_compared(session: SparkSession, zone: RawZone) -> None:
    """SCD1 has no entry of a dropped column after the next change of the row; the history has."""
    before = relation(column("id"), column("d", "date", attnum=2), column("v", "date", attnum=3))
    after = relation(column("id"), column("v", "date", attnum=3))
    landing = Landing(zone, [before, after])
    tables = Merged(session, landing)
    landing.begin()
    landing.land([insert("1", "infinity", "2024-01-01"), insert("2", "infinity", "infinity")])
    tables.merge(BOTH)
    landing.land([insert("3", "2024-01-01", version=2)])
    tables.merge(BOTH)
    assert not broken(tables.check_merged(2, BOTH))
    assert not broken(tables.check_all(2, BOTH))
    DeltaTable(tables.path(1)).update(predicate="id = 2", updates={"_rescued": "null"})
    assert broken(tables.check_all(2, BOTH)) == {Rule.NOT_IN_SCD1: 1}


@pytest.mark.parametrize("names", [("id",), ("a, b", 'c"d', '", "')])
def test_a_key_is_read_exactly(names: tuple[str, ...]) -> None:
    assert parse_key(key_text(names)) == names
    assert parse_key("") == ()
