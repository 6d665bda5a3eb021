"""Rewrites of tables that only the catalog shows."""

from __future__ import annotations

import pytest

from pgcdc_assets_tests.capture.test_schema_watch import poll, shown
from pgcdc_assets_tests.support.captures import Capturing

pytestmark = [pytest.mark.postgres, pytest.mark.every_pg]

# Statements before the first poll, statements after it, and the expected change of the table.
_REWRITES = {
    "using_it": ("", "alter table {t} alter a type int using a * 2", "table_rewritten!"),
    "using_later": ("", "alter table {t} alter b type text using b || 'x'", "table_rewritten!"),
    "using_and_back": (
        "",
        "alter table {t} alter a type bigint; alter table {t} alter a type int",
        "table_rewritten!",
    ),
    "using_default": (
        "alter table {t} add c int default 5",
        "alter table {t} alter c type int using c + 1",
        "table_rewritten!",
    ),
    "using_and_default": (
        "alter table {t} add c int default 5",
        "alter table {t} alter c type int using c * 100;alter table {t} alter c set default 500",
        "table_rewritten!",
    ),
    "using_and_not_null": (
        "alter table {t} add c int default 5; alter table {t} alter c drop default",
        "alter table {t} alter c type int using c * 100;alter table {t} alter c set not null",
        "table_rewritten!",
    ),
    "not_null": (
        "alter table {t} add c int default 5", "alter table {t} alter c set not null", "",
    ),
    "vacuumed": ("", "vacuum full {t}", ""),
    "full_default": ("alter table {t} add c int default 5", "vacuum full {t}", ""),
    "clustered": ("alter table {t} add c int default 5", "cluster {t} using {t}_pkey", ""),
    "truncated": ("", "truncate {t}; insert into {t} values (7)", ""),
    "statistics": ("", "alter table {t} alter a set statistics 10; analyze {t}", ""),
    "other_column": ("", "alter table {t} add c timestamptz default clock_timestamp()",
                     "column_added c!"),
    "loaded": (
        "",
        "alter table {t} set unlogged; insert into {t} values (8);alter table {t} set logged",
        "table_rewritten!",
    ),
    "loaded_default": (
        "alter table {t} add c int default 5",
        "alter table {t} set unlogged; delete from {t}; alter table {t} set logged",
        "table_rewritten!",
    ),
    "unsent": (
        "",
        "alter table {t} add c int generated always as (id * a) stored",
        "values_uncertain",
    ),
    "moved_file": ("", "alter table {t} set (fillfactor = 70); vacuum full {t}", ""),
}  # fmt: skip


def test_only_an_alter_table_that_keeps_the_types_is_a_rewrite(capturing: Capturing) -> None:
    """F3, F5, F7. The rows of an unlogged table are not in the WAL."""
    capturing.begin(
        *(
            f"create table {t} (id int primary key, a int, b text); insert into {t} values (1)"
            for t in _REWRITES
        )
    )
    for t, (before, _, _) in _REWRITES.items():
        if before:
            capturing.database.execute(before.format(t=t))
    assert poll(capturing) == []
    for t, (_, statements, _) in _REWRITES.items():
        for statement in statements.format(t=t).split("; "):
            capturing.database.execute(statement)
    expected = sorted(f"{t} {change}" for t, (_, _, change) in _REWRITES.items() if change)
    assert shown(poll(capturing)) == expected
    assert poll(capturing) == []
