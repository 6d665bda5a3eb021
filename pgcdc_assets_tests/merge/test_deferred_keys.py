"""A key that is a part of the replica identity, and unique only at the commit: two rows may have it
within a transaction. Each table is compared with the source, by both ways of a merge.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from pgcdc_assets.merge import MergeReport
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.tables.state import table_path
from pgcdc_assets_tests.support.merge.pipeline import Pipeline
from pgcdc_assets_tests.support.merge.small_tables import merge_by_spark, merge_together

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.sampled,
]

Choose = Callable[[pytest.MonkeyPatch], None]
Row = tuple[Any, ...]

TARGETS = (
    CdcTable("public", "t", key=("id",), scd=(1, 2)),
    CdcTable("public", "kept", key=("id",), soft_deletes=True),
)
# The columns are in another order than the keys.
_TABLE = """
create table {table} (
    v text, part int, doc text, id int unique deferrable initially {mode}, primary key (part, id)
);
alter table {table} alter doc set storage external;
insert into {table} select 'old ' || i, 1, repeat('d' || i, 2000), i from generate_series(1, 109) i
 where i % 10 > 0
"""

both_ways = pytest.mark.parametrize("choose", [merge_by_spark, merge_together])
runs = pytest.mark.parametrize("merges_each", [True, False], ids=["each", "all at once"])


@dataclass
class Compared:
    """Tables of `TARGETS` and their source.

    Attributes:
        commits: by the end of the window of each transaction, the rows of the source after it.
    """

    pipeline: Pipeline
    commits: list[tuple[int, list[Row]]] = field(default_factory=list)

    def start(self, mode: str = "deferred", *statements: str) -> None:
        """Create the tables, and merge their snapshots."""
        made = (_TABLE.format(table=each.table, mode=mode) for each in TARGETS)
        self.pipeline.start(*made, *statements)
        self.pipeline.capture()
        self.merge()

    def commit(self, *statements: str) -> None:
        """Commit a transaction in each table, and capture it."""
        for target in TARGETS:
            self.pipeline.database.transaction(
                *(statement.format(t=target.table) for statement in statements)
            )
        window = self.pipeline.capture()
        self.commits.append((int(window.end), self.source("t")))

    def merge(self) -> None:
        """Merge the captured windows."""
        for report in self.pipeline.merge(None, *TARGETS).values():
            assert isinstance(report, MergeReport), report.error

    def source(self, table: str) -> list[Row]:
        """Return the rows of the source, with digests of the large values."""
        return sorted(
            self.pipeline.database.query(f"select id, part, v, md5(doc) from {table}"), key=repr
        )

    def check(self) -> None:
        """Compare the tables, and the history after each commit, with the source."""
        expected = self.source("t")
        assert self.stored("t", 1) == expected
        assert self.stored("t", 2, "_is_current") == expected
        assert self.stored("kept", 1, "not _deleted") == self.source("kept") == expected
        keys = [row[0] for row in self.stored("kept", 1)]
        assert len(keys) == len(set(keys))
        for end, rows in self.commits:
            is_open = f"(_valid_to_lsn is null or _valid_to_lsn >= {end})"
            assert self.stored("t", 2, f"_valid_from_lsn < {end} and {is_open}") == rows

    def stored(self, table: str, scd: int, condition: str = "true") -> list[Row]:
        """Return rows of a merged table."""
        zone = self.pipeline.zone
        path = table_path(zone.lake, zone.name, "public", table, scd)
        rows = self.pipeline.spark.read.format("delta").load(path).where(condition)
        return sorted(
            map(tuple, rows.selectExpr("id", "part", "v", "md5(doc)").collect()), key=repr
        )

    def versions(self, key: int) -> list[Row]:
        """Return the versions of a key in order: the values, and whether it is a current one."""
        zone = self.pipeline.zone
        path = table_path(zone.lake, zone.name, "public", "t", 2)
        rows = self.pipeline.spark.read.format("delta").load(path).where(f"id = {key}")
        ordered = rows.orderBy("_valid_from_lsn", "_ordinal")
        return list(map(tuple, ordered.select("part", "v", "_is_current").collect()))


@pytest.fixture
def compared(pipeline: Pipeline) -> Compared:
    return Compared(pipeline)


# Each has the keys {b}1 to {b}9 for itself.
_TRANSACTIONS: dict[str, Sequence[str]] = {
    "a row takes the key before its row is deleted": (
        "insert into {t} values ('new 1', 2, 'n', {b}1)",
        "delete from {t} where part = 1 and id = {b}1",
    ),
    "two rows swap the key": (
        "update {t} set part = 3, id = {b}2 where id = {b}1",
        "update {t} set part = 4, id = {b}1 where id = {b}2 and part = 1",
    ),
    "three rows rotate": (
        "update {t} set id = {b}2, part = part + 10 where v = 'old {b}1'",
        "update {t} set id = {b}3, part = part + 10 where v = 'old {b}2'",
        "update {t} set id = {b}1, part = part + 10 where v = 'old {b}3'",
    ),
    "a row passes the key of an unchanged row": (
        "insert into {t} values ('passing', 7, 'n', {b}5)",
        "delete from {t} where part = 7 and id = {b}5",
        "update {t} set id = {b}6, part = 8 where id = {b}4",
        "update {t} set id = {b}0 where part = 8 and id = {b}6",
    ),
    "the row leaves, and comes back": (
        "insert into {t} values ('other', 7, 'n', {b}1)",
        "update {t} set id = {b}0 where id = {b}1 and part = 1",
        "delete from {t} where part = 7 and id = {b}1",
        "update {t} set id = {b}1 where id = {b}0",
    ),
    "the row moves, and the key is inserted again": (
        "update {t} set id = {b}2, part = 5 where id = {b}1",
        "insert into {t} values ('again', 1, 'n', {b}1)",
        "delete from {t} where id = {b}2 and part = 1",
    ),
    "the row is deleted, inserted again and deleted while another row has the key": (
        "insert into {t} values ('other', 7, 'n', {b}1)",
        "delete from {t} where id = {b}1 and part = 1",
        "insert into {t} values ('short', 1, 'n', {b}1)",
        "update {t} set v = 'other, changed' where part = 7 and id = {b}1",
        "delete from {t} where id = {b}1 and part = 1",
    ),
    "both rows leave": (
        "insert into {t} values ('other', 7, 'n', {b}1)",
        "delete from {t} where id = {b}1 and part = 1",
        "delete from {t} where id = {b}1",
    ),
    "the other column alone changes": (
        "update {t} set part = 2 where id = {b}1",
        "insert into {t} values ('other', 1, 'n', {b}1)",
        "update {t} set part = 3 where id = {b}1 and part = 2",
        "delete from {t} where id = {b}1 and part = 1",
    ),
    "a value that is left out moves with its row": (
        "insert into {t} values ('other', 7, 'n', {b}2)",
        "update {t} set v = 'changed' where id = {b}2 and part = 1",
        "update {t} set part = 9 where id = {b}2 and part = 1",
        "update {t} set v = 'other, changed' where id = {b}2 and part = 7",
        "delete from {t} where id = {b}2 and part = 7",
    ),
}


@both_ways
def test_transactions_in_which_two_rows_have_one_key(
    compared: Compared, monkeypatch: pytest.MonkeyPatch, choose: Choose
) -> None:
    choose(monkeypatch)
    compared.start()
    for number, statements in enumerate(_TRANSACTIONS.values(), 1):
        compared.commit(*(statement.replace("{b}", str(number)) for statement in statements))
    compared.merge()
    compared.check()


@both_ways
def test_rows_that_are_truncated_while_two_have_one_key(
    compared: Compared, monkeypatch: pytest.MonkeyPatch, choose: Choose
) -> None:
    choose(monkeypatch)
    compared.start()
    compared.commit(
        "insert into {t} values ('other', 7, 'n', 11)",
        "delete from {t} where part = 1 and id = 11",
        # TRUNCATE waits for no check of a constraint.
        "set constraints all immediate",
        "truncate {t}",
        "set constraints all deferred",
        "insert into {t} values ('new', 7, 'n', 11), ('newer', 8, 'n', 11)",
        "delete from {t} where part = 7",
    )
    compared.merge()
    compared.check()


def _transactions(*names: str) -> list[list[str]]:
    return [[each.replace("{b}", "") for each in _TRANSACTIONS[name]] for name in names]


@both_ways
@runs
def test_transactions_one_after_the_other(
    compared: Compared, monkeypatch: pytest.MonkeyPatch, choose: Choose, merges_each: bool
) -> None:
    """A row that a transaction brought is deleted in the next one, and the key is used again."""
    choose(monkeypatch)
    compared.start()
    for statements in (
        *_transactions("a row takes the key before its row is deleted", "two rows swap the key"),
        ["update {t} set v = 'new 1, changed' where id = 1"],
        *_transactions("a row passes the key of an unchanged row"),
        ["delete from {t} where id = 2"],
        ["insert into {t} values ('back', 1, 'n', 2)"],
        ["update {t} set v = v || '!' where id in (1, 3, 5)"],
    ):
        compared.commit(*statements)
        if merges_each:
            compared.merge()
    compared.merge()
    compared.check()


@both_ways
def test_a_key_is_checked_at_the_end_of_the_statement(
    compared: Compared, monkeypatch: pytest.MonkeyPatch, choose: Choose
) -> None:
    choose(monkeypatch)
    compared.start("immediate")
    compared.commit("update {t} set id = 110 - id, part = 1000 + id")
    compared.commit("update {t} set id = id + 1, part = part + 1")
    compared.merge()
    compared.check()


@both_ways
def test_the_versions_within_a_transaction(
    compared: Compared, monkeypatch: pytest.MonkeyPatch, choose: Choose
) -> None:
    """A key with one row at any time keeps its steps. For another key the transaction is a step."""
    choose(monkeypatch)
    compared.start()
    compared.commit(
        "delete from {t} where id = 1",
        "insert into {t} values ('short', 1, 'n', 1)",
        "update {t} set part = 2 where id = 1",
        "insert into {t} values ('passing', 7, 'n', 2)",
        "update {t} set v = 'passing, changed' where part = 7",
        "delete from {t} where part = 7",
        "insert into {t} values ('new', 7, 'n', 3)",
        "update {t} set v = 'newer' where part = 7",
        "delete from {t} where part = 1 and id = 3",
        "insert into {t} values ('short', 1, 'n', 110)",
        "delete from {t} where id = 110",
    )
    compared.merge()
    compared.check()
    assert compared.versions(1) == [
        (1, "old 1", False),
        (1, "short", False),
        (2, "short", True),
    ]
    assert compared.versions(2) == [(1, "old 2", True)]
    assert compared.versions(3) == [(1, "old 3", False), (7, "newer", True)]
    assert compared.versions(110) == [(1, "short", False)]


@both_ways
def test_a_deferred_primary_key_within_an_identity_index(
    compared: Compared, monkeypatch: pytest.MonkeyPatch, choose: Choose
) -> None:
    """The settings name no key: the primary key is a part of the replica identity."""
    choose(monkeypatch)
    pipeline = compared.pipeline
    pipeline.start(
        "create table t (id int primary key deferrable initially deferred, part int not null, "
        "v text)",
        "create unique index t_key on t (part, id)",
        "alter table t replica identity using index t_key",
        "insert into t values (1, 1, 'old 1'), (2, 1, 'old 2')",
    )
    target = CdcTable("public", "t", scd=(1, 2))
    pipeline.capture()
    pipeline.merge(None, target)
    pipeline.database.transaction(
        "update t set id = 2, part = 2 where id = 1", "update t set id = 1 where part = 1"
    )
    pipeline.database.transaction(
        "insert into t values (1, 3, 'new')", "delete from t where part = 1"
    )
    pipeline.capture()
    pipeline.merge(None, target)
    assert pipeline.rows() == [(1, "new"), (2, "old 1")]


@both_ways
@runs
def test_random_transactions(
    compared: Compared,
    monkeypatch: pytest.MonkeyPatch,
    rng: random.Random,
    choose: Choose,
    merges_each: bool,
) -> None:
    choose(monkeypatch)
    compared.start()
    for _ in range(8):
        compared.commit(*_random_statements(rng))
        if merges_each:
            compared.merge()
    compared.merge()
    compared.check()


def _random_statements(rng: random.Random) -> list[str]:
    """Write the statements of a transaction that leaves one row for each key."""
    statements = []
    for number in range(rng.randint(1, 12)):
        part, key, to_part, to_key = (rng.randint(1, 4) for _ in range(4))
        row = f"part = {part} and id = {key}"
        is_free = f"not exists (select from {{t}} where part = {to_part} and id = {to_key})"
        # An unchanged `doc` is left out of the stream.
        doc = rng.choice(["'n'", f"repeat('{number}', 5000)"])
        value = rng.choice(["'same'", f"'value {number}'"])
        statements.append(
            rng.choice(
                [
                    f"insert into {{t}} values ({value}, {part}, {doc}, {key}) "
                    "on conflict (part, id) do nothing",
                    f"delete from {{t}} where {row}",
                    f"update {{t}} set v = {value} where {row}",
                    f"update {{t}} set v = {value}, doc = {doc} where id = {key}",
                    f"update {{t}} set part = {to_part}, id = {to_key} where {row} and {is_free}",
                    f"update {{t}} set part = {to_part} + 10, id = {to_key} where {row} and not "
                    f"exists (select from {{t}} where part = {to_part} + 10 and id = {to_key})",
                ]
            )
        )
    statements.append(
        "delete from {t} a using {t} b where a.id = b.id and "
        + rng.choice(["a.part > b.part", "a.part < b.part"])
    )
    return statements
