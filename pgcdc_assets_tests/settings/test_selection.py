"""The patterns of a capture that follows its publication."""

from __future__ import annotations

import time

import pytest

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets.settings.selection import TablePattern, TableSelection
from pgcdc_assets.table_name import TableName


@pytest.mark.parametrize(
    ("pattern", "schema", "table", "expected"),
    [
        ("*.*", "shop", "orders", True),
        ("*.*", "a.b", "new\nline", True),
        ("shop.*", "shop", "a.b.c", True),
        ("shop.*", "shops", "orders", False),
        ("shop.*", "Shop", "orders", False),
        ("shop.tmp_*", "shop", "tmp_1", True),
        ("shop.tmp_*", "shop", "tmp", False),
        ("*.*_old", "x", "orders_old", True),
        ("*.*_old", "x", "orders_old_2", False),
        ("s?op.o*r*s", "shop", "orders", True),
        ("s?op.o*r*s", "shop", "ors", True),
        ("s?op.o*r*s", "sop", "orders", False),
        ("shop.?", "shop", "😀", True),
        ("shop.?", "shop", "", False),
        ("shop.a*a", "shop", "a", False),
        ("shop.*aab", "shop", "aaaab", True),
        ("shop.a.b", "shop", "axb", False),
        ("shop.a[1]", "shop", "a[1]", True),
        ("shop.a[1]", "shop", "a1", False),
        ("shop.a\\*", "shop", "a\\b", True),
        ('shop."a*"', "shop", "a*", True),
        ('shop."a*"', "shop", "ab", False),
        ('"a.b".*', "a.b", "t", True),
        ('"a.b".*', "axb", "t", False),
        ('*."say ""hi"""', "x", 'say "hi"', True),
        ('shop.U&"a\\0020*"', "shop", "a *", True),
    ],
)
def test_patterns_match_by_the_documented_rules(
    pattern: str, schema: str, table: str, expected: bool
) -> None:
    assert TablePattern.parse(pattern).matches(TableName(schema, table)) is expected


@pytest.mark.parametrize("text", ["", "*", "orders", ".", "shop.", ".orders", 'shop."a', 'a"b.c'])
def test_an_invalid_pattern_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="not a pattern of table names"):
        TableSelection(include=(text,))
    with pytest.raises(ConfigurationError, match="not a pattern of table names"):
        TableSelection(exclude=(text,))


def test_a_pattern_with_many_stars_does_not_backtrack() -> None:
    pattern = TablePattern.parse("*." + "*a" * 60 + "b")
    began = time.process_time()
    assert not pattern.matches(TableName("s", "a" * 63))
    assert time.process_time() - began < 1


def test_exclude_takes_precedence_over_include() -> None:
    selection = TableSelection(include=("shop.*", "app.o*"), exclude=("*.tmp_*",))
    assert selection.selects(TableName("app", "orders"))
    assert selection.find_reason(TableName("app", "users")) == "matches no pattern of include"
    reason = selection.find_reason(TableName("shop", "tmp_1"))
    assert reason == "matches the pattern *.tmp_* of exclude"


def test_listed_tables_get_the_common_settings_and_named_tables_their_own() -> None:
    named = CdcTable("shop", "orders", key=("id",), scd=(2,))
    selection = TableSelection(exclude=("*.tmp_*",), scd=(1, 2), soft_deletes=True)
    capture = CdcCapture("t", "pub", (named,), selection=selection, on_schema_change="ask")
    names = [TableName("shop", name) for name in ("users", "tmp_1")]
    listed = capture.with_listed_tables(names)
    (users,) = listed.tables
    assert (users.scd, users.soft_deletes, users.schema_policy) == ((1, 2), True, "ask")
    # A table keeps its own settings after a list without the table.
    again = listed.with_listed_tables([*names, named.name])
    assert [table.scd for table in again.tables] == [(2,), (1, 2)]
    assert again.tables[0].key == ("id",)


def test_settings_of_an_excluded_table_are_refused() -> None:
    selection = TableSelection(exclude=("*.tmp_*",))
    with pytest.raises(ConfigurationError, match=r"shop\.tmp_1 has settings of its own, but match"):
        CdcCapture("t", "pub", (CdcTable("shop", "tmp_1"),), selection=selection)
    with pytest.raises(ConfigurationError, match=r"scd is \[3\]"):
        CdcCapture("t", "pub", (), selection=TableSelection(scd=(3,)))
    with pytest.raises(ConfigurationError, match="include must have at least one pattern"):
        TableSelection(include=())
