"""SCD tables have the comments of the source table and its columns."""

from __future__ import annotations

from typing import Any

import pytest
from deltalake import DeltaTable

from pgcdc_assets.merge import MergeReport, rebuild_table
from pgcdc_assets.protocol.table_definition import COMMENT_LENGTH
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets_tests.support.merge.pipeline import Pipeline

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

_TARGET = CdcTable("public", "t", scd=(1, 2))
_HOSTILE = (
    """it's "quoted" \\ \' ${env:PATH} ${spark.app.name} {{x}} `t` ; -- /* \u0041 \n é😀 \x01"""
    "\nsecond line\t"
)


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _table(pipeline: Pipeline, scd: int) -> DeltaTable:
    path = pipeline.path("t", scd)
    return DeltaTable(path)


def _comments(pipeline: Pipeline, scd: int) -> dict[str | None, Any]:
    """Return the comments of the source's columns, with the comment of the table as None."""
    table = _table(pipeline, scd)
    fields = [field for field in table.schema().fields if not field.name.startswith("_")]
    return {f.name: f.metadata.get("comment") for f in fields} | {
        None: table.metadata().description
    }


def _merge(pipeline: Pipeline) -> list[MergeReport]:
    pipeline.capture()
    reports = []
    for scd in (1, 2):
        (report,) = pipeline.merge(None, CdcTable("public", "t", scd=(scd,))).values()
        assert isinstance(report, MergeReport), str(report.error.__cause__ or report.error)
        reports.append(report)
    return reports


def _metadata_commits(pipeline: Pipeline, scd: int) -> int:
    history = _table(pipeline, scd).history()
    return sum(entry["operation"] in ("SET TBLPROPERTIES", "CHANGE COLUMN", "CHANGE COLUMNS")
               for entry in history)  # fmt: skip


@pytest.mark.sampled
def test_comments_follow_the_source_without_rows_and_versions(pipeline: Pipeline) -> None:
    database = pipeline.database
    pipeline.start(
        'create table t (id int primary key, a int, b text, "o\'c `x`" text);'
        "insert into t values (1, 1, 'x', 'y'), (2, 2, 'x', 'y');"
        f"comment on column t.b is {_literal(_HOSTILE)}; comment on table t is {_literal(_HOSTILE)}"
    )
    _merge(pipeline)
    first: dict[str | None, str | None] = {
        "id": "integer", "a": "integer", "b": _HOSTILE, "o'c `x`": "text", None: _HOSTILE,
    }  # fmt: skip
    for scd in (1, 2):
        # The commit that creates the table has the comments.
        assert _comments(pipeline, scd) == first
        assert _metadata_commits(pipeline, scd) == 0
    path = pipeline.path("t", 2)
    pipeline.spark.sql(f"ALTER TABLE {delta_table(path)} ALTER COLUMN id COMMENT 'mine'")

    # Only the catalog shows the new comments.
    huge = "😀" * 50_000
    database.execute(
        f"comment on column t.a is {_literal(_HOSTILE * 2)}; comment on table t is 'orders';"
        "comment on column t.\"o'c `x`\" is 'odd'; comment on column t.id is 'theirs';"
        f"comment on column t.b is '{huge}'"
    )
    _merge(pipeline)
    assert pipeline.zone.schema_events.read() == []
    cut = "😀" * (COMMENT_LENGTH - 1) + "…"
    second: dict[str | None, str | None] = {
        "id": "theirs", "a": _HOSTILE * 2, "b": cut, "o'c `x`": "odd", None: "orders",
    }  # fmt: skip
    assert _comments(pipeline, 1) == second
    assert _comments(pipeline, 2) == second | {"id": "mine"}
    commits = [_table(pipeline, scd).version() for scd in (1, 2)]
    counts = [_metadata_commits(pipeline, scd) for scd in (1, 2)]
    database.execute("update t set a = 3 where id = 1")
    reports = _merge(pipeline)
    assert [report.row_count for report in reports] == [2, 3]
    assert [_metadata_commits(pipeline, scd) for scd in (1, 2)] == counts
    assert [_table(pipeline, scd).version() for scd in (1, 2)] > commits

    # A comment follows its column. A column without a comment shows its type.
    database.execute(
        "alter table t rename a to amount;"
        "alter table t drop b; alter table t add b int; comment on column t.b is 'another';"
        'comment on column t."o\'c `x`" is null; comment on table t is null;'
        "update t set b = 5 where id = 2"
    )
    _merge(pipeline)
    third: dict[str | None, str | None] = {
        "id": "theirs", "amount": _HOSTILE * 2, "b": "another", "o'c `x`": "text", None: "",
    }  # fmt: skip
    for scd, expected in ((1, third), (2, third | {"id": "mine"})):
        found = _comments(pipeline, scd)
        found[None] = found[None] or ""
        assert {name: found.get(name) for name in expected} == expected, found
    database.execute("comment on column t.b is 'a last one'")
    pipeline.copy("t")
    _merge(pipeline)
    for scd in (1, 2):
        rebuild_table(pipeline.spark, pipeline.zone, _TARGET, scd)
    # A rebuild of a table with column mapping loses comments of the owner.
    third |= {"b": "a last one"}
    for scd, expected in ((1, third), (2, third)):
        found = _comments(pipeline, scd)
        found[None] = found[None] or ""
        assert {name: found.get(name) for name in expected} == expected, found
    database.execute("comment on column t.b is null")
    _merge(pipeline)
    assert [_comments(pipeline, scd)["b"] for scd in (1, 2)] == ["integer", "integer"]
    pipeline.assert_equal("t")
