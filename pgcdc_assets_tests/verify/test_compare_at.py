"""The comparison at one LSN reports exactly the planted differences."""

from __future__ import annotations

import pytest
from pyarrow.fs import FileSelector

from pgcdc_assets.errors import ConfigurationError, MergeConflict, TableDamaged, TransientError
from pgcdc_assets.raw.delta.files import filesystem, write_file
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets.verify import (
    Comparison,
    ComparisonFailure,
    Difference,
    DifferenceKind,
    compare_at,
    compare_tables,
    small_table,
    source_moment,
    wait_captured,
)
from pgcdc_assets_tests.support.merge.pipeline import PUBLICATION, Pipeline
from pgcdc_assets_tests.support.verify.comparison import compare, moment_of, verify

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.sampled]
SOAK = pytest.mark.soak

ODD_TEXTS = [
    "",
    " ",
    "NULL",
    "a,b",
    'say "x"',
    "it's",
    "back\\slash",
    "tab\tand\nline",
    "{1}",
    "é€😀",
    "100%",
    "N",
    "1:a",
]


def plant(pipeline: Pipeline, statement: str, table: str = "t") -> None:
    """Change the SCD1 table without a merge, and keep its watermark."""
    pipeline.spark.sql(statement.format(t=delta_table(pipeline.path(table))))


def found_in(comparison: Comparison) -> set[tuple[DifferenceKind, tuple[str | None, ...]]]:
    return {(difference.kind, difference.key) for difference in comparison.differences}


def test_the_sides_are_equal_after_the_snapshot_after_changes_and_before_a_merge(
    pipeline: Pipeline,
) -> None:
    pipeline.start(
        "create table t (id int primary key, v text, n numeric(10, 2))",
        "insert into t select i, 'row ' || i, i / 4.0 from generate_series(1, 500) i",
    )
    pipeline.sync()
    assert verify(pipeline).is_equal
    pipeline.database.execute("update t set v = null where id % 7 = 0")
    pipeline.database.execute("delete from t where id % 5 = 0")
    pipeline.database.execute("insert into t values (1000, '', null)")
    found = verify(pipeline)
    assert found.is_equal, found
    assert found.source_rows == found.target_rows == 401
    pipeline.merge()
    assert verify(pipeline).is_equal
    staging = filesystem(pipeline.zone.lake, pipeline.zone.lake.path(pipeline.zone.name, "verify"))
    assert staging.get_file_info(FileSelector("", allow_not_found=True)) == []


@pytest.mark.parametrize(
    ("is_merged", "is_small"),
    [pytest.param(True, True, marks=SOAK), pytest.param(False, True, marks=SOAK), (False, False)],
)
def test_a_wrong_a_missing_and_an_extra_row_are_reported_by_key(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, is_merged: bool, is_small: bool
) -> None:
    if not is_small:
        monkeypatch.setattr(small_table, "SMALL_ROWS", -1)
    pipeline.start(
        "create table t (id int primary key, v text, n int)",
        "insert into t select i, 'row ' || i, i from generate_series(1, 2000) i",
    )
    pipeline.sync()
    if not is_merged:
        # The fold of these changes must find the planted rows and keep them.
        pipeline.database.execute("update t set n = n + 1 where id % 100 = 0")
    plant(pipeline, "UPDATE {t} SET v = 'wrong', n = -1 WHERE id = 17")
    plant(pipeline, "DELETE FROM {t} WHERE id = 1234")
    plant(
        pipeline,
        "INSERT INTO {t} SELECT 9999 AS id, v, n, _lsn, _ordinal, _commit_ts, _rescued FROM {t} "
        "WHERE id = 1",
    )
    found = verify(pipeline)
    assert (found.missing, found.extra, found.differing) == (1, 1, 1)
    assert found.columns == ("v", "n")
    assert found.key_columns == ("id",)
    assert set(found.differences) == {
        Difference(DifferenceKind.MISSING, ("1234",)),
        Difference(DifferenceKind.EXTRA, ("9999",)),
        Difference(DifferenceKind.DIFFERS, ("17",), ("v", "n")),
    }


def test_tables_compared_together_have_separate_results_and_failures(
    pipeline: Pipeline,
) -> None:
    """The results are equal, wrong, never merged, and wrong. One merge folds the later changes."""
    pipeline.tables = ("t", "u", "w")
    for table in ("t", "u", "w", "unmerged"):
        pipeline.database.execute(f"create table {table} (id int primary key, v text)")
        pipeline.database.execute(f"insert into {table} values (1, '{table}'), (2, 'same')")
    pipeline.start()
    pipeline.sync()
    for table in ("t", "u"):
        pipeline.database.execute(f"update {table} set v = 'changed' where id = 2")
    plant(pipeline, "UPDATE {t} SET v = 'wrong' WHERE id = 1", "u")
    plant(pipeline, "DELETE FROM {t} WHERE id = 2", "w")
    with moment_of(pipeline) as moment:
        pipeline.capture()
        found = list(
            compare_tables(
                pipeline.spark,
                pipeline.database.settings(),
                pipeline.zone,
                PUBLICATION,
                [CdcTable("public", table) for table in ("t", "u", "unmerged", "w")],
                moment,
            )
        )
    equal, wrong, failure, missing = found
    assert [each.table for each in found] == ["t", "u", "unmerged", "w"]
    assert isinstance(equal, Comparison) and equal.is_equal
    assert isinstance(wrong, Comparison) and isinstance(missing, Comparison)
    assert wrong.differences == (Difference(DifferenceKind.DIFFERS, ("1",), ("v",)),)
    assert missing.differences == (Difference(DifferenceKind.MISSING, ("2",)),)
    assert isinstance(failure, ComparisonFailure)
    assert "never merged" in str(failure.error)


def test_a_duplicate_row_is_an_extra_row(pipeline: Pipeline) -> None:
    pipeline.start("create table t (id int primary key, v text)", "insert into t values (1, 'a')")
    pipeline.sync()
    plant(pipeline, "INSERT INTO {t} SELECT * FROM {t}")
    found = verify(pipeline)
    assert found_in(found) == {(DifferenceKind.EXTRA, ("1",))}


def test_composite_keys_and_unusual_texts_are_reported_exactly(pipeline: Pipeline) -> None:
    pipeline.tables = ("t",)
    pipeline.start('create table t (b text, "a %s" bigint, v text, primary key ("a %s", b))')
    for number, text in enumerate(ODD_TEXTS):
        pipeline.database.execute(
            "insert into t values (%s, %s, %s)", (text, number % 3, f"v{number}")
        )
    pipeline.sync()
    assert verify(pipeline).is_equal
    plant(pipeline, "UPDATE {t} SET v = 'wrong' WHERE true")
    found = verify(pipeline)
    assert found.differing == len(ODD_TEXTS)
    assert found.key_columns == ("a %s", "b")
    expected = {
        (DifferenceKind.DIFFERS, (str(number % 3), text)) for number, text in enumerate(ODD_TEXTS)
    }
    assert found_in(found) == expected


@pytest.mark.soak
def test_null_and_the_empty_text_differ(pipeline: Pipeline) -> None:
    pipeline.start(
        "create table t (id int primary key, v text)", "insert into t values (1, null), (2, '')"
    )
    pipeline.sync()
    assert verify(pipeline).is_equal
    plant(pipeline, "UPDATE {t} SET v = IF(id = 1, '', NULL)")
    assert verify(pipeline).differing == 2


def test_a_rescued_text_counts_as_the_value(pipeline: Pipeline) -> None:
    pipeline.start(
        "create table t (id int primary key, v numeric(6, 2))", "insert into t values (1, 'NaN')"
    )
    pipeline.sync()
    assert verify(pipeline).is_equal
    plant(pipeline, "UPDATE {t} SET _rescued = NULL")
    assert verify(pipeline).columns == ("v",)


@pytest.mark.soak
def test_many_differences_are_counted_and_some_are_reported_by_key(pipeline: Pipeline) -> None:
    pipeline.start(
        "create table t (id int primary key, v text)",
        "insert into t select i, 'v' from generate_series(1, 30000) i",
    )
    pipeline.sync()
    plant(pipeline, "UPDATE {t} SET v = 'w' WHERE id <= 20000")
    plant(pipeline, "DELETE FROM {t} WHERE id > 29000")
    found = verify(pipeline)
    assert (found.missing, found.extra, found.differing) == (1000, 0, 20000)
    assert found.is_counted
    assert len(found.differences) == 20
    assert {difference.kind for difference in found.differences} == {
        DifferenceKind.MISSING,
        DifferenceKind.DIFFERS,
    }


def test_row_filter_and_column_list_apply_to_the_source_too(pipeline: Pipeline) -> None:
    """D13: the publication's row filter selects the compared rows."""
    database = pipeline.database
    database.execute("create table t (id int primary key, v text, hidden text)")
    database.execute("insert into t select i, 'v{}%%s', 'h' from generate_series(1, 20) i")
    database.execute(
        f"create publication {PUBLICATION} for table t (id, v) where (id % 2 = 0 and v like '%s')"
    )
    pipeline.copy()
    pipeline.sync()
    database.execute("insert into t values (21, '%s', 'h'), (22, '%s', 'h')")
    found = verify(pipeline)
    assert found.is_equal, found
    assert found.source_rows == 11


def test_commits_after_the_comparison_point_are_on_neither_side(pipeline: Pipeline) -> None:
    """One window has changes on both sides of the comparison point, and merges are beyond it."""
    pipeline.start(
        "create table t (id int primary key, v text)",
        "insert into t select i, 'old' from generate_series(1, 100) i",
    )
    pipeline.sync()
    pipeline.database.execute("update t set v = 'before' where id <= 10")
    with moment_of(pipeline) as moment:
        pipeline.database.execute("update t set v = 'after' where id <= 20")
        pipeline.database.execute("delete from t where id > 90")
        pipeline.capture()
        unmerged = compare(pipeline, moment)
        pipeline.merge()
        merged = compare(pipeline, moment)
    for found in (unmerged, merged):
        assert found.is_equal, found
        assert found.source_rows == 100
        assert found.lsn == moment.lsn
    assert len(pipeline.rows()) == 90


@pytest.mark.soak
def test_a_snapshot_before_the_comparison_point_is_part_of_it(pipeline: Pipeline) -> None:
    pipeline.start("create table t (id int primary key, v text)", "insert into t values (1, 'a')")
    pipeline.sync()
    pipeline.database.execute("update t set v = 'b'")
    pipeline.copy("t")
    pipeline.database.execute("insert into t values (2, 'c')")
    assert verify(pipeline).is_equal


@pytest.mark.soak
def test_the_key_of_the_settings_identifies_compared_rows(pipeline: Pipeline) -> None:
    pipeline.start(
        "create table t (id int primary key, v text unique not null)",
        "alter table t replica identity full",
        "insert into t values (1, 'a'), (2, 'b')",
    )
    pipeline.capture()
    pipeline.merge(None, CdcTable("public", "t", key=("v",)))
    plant(pipeline, "UPDATE {t} SET id = 7 WHERE v = 'b'")
    found = verify(pipeline, key=("v",))
    assert found.differences == (Difference(DifferenceKind.DIFFERS, ("b",), ("id",)),)


def test_a_column_of_only_one_side_is_a_difference(pipeline: Pipeline) -> None:
    pipeline.start("create table t (id int primary key, v text)", "insert into t values (1, 'a')")
    pipeline.sync()
    pipeline.database.execute("alter table t add column added int")
    found = verify(pipeline)
    assert found.columns == ("added",)
    assert not found.is_equal


def test_the_error_names_a_table_that_is_unpublished_or_never_merged(pipeline: Pipeline) -> None:
    pipeline.start("create table t (id int primary key, v text)")
    with pytest.raises(ConfigurationError, match=r"public\.t was never merged"):
        verify(pipeline)
    pipeline.sync()
    pipeline.database.execute("create table other (id int primary key)")
    with pytest.raises((ConfigurationError, MergeConflict), match=r"public\.other"):
        verify(pipeline, "other")


def test_the_error_names_a_table_with_an_unreadable_log(pipeline: Pipeline) -> None:
    pipeline.start("create table t (id int primary key)", "insert into t values (1)")
    pipeline.sync()
    log = filesystem(pipeline.zone.lake, f"{pipeline.path()}/_delta_log")
    entries = [found.base_name for found in log.get_file_info(FileSelector(""))]
    write_file(log, max(name for name in entries if name.endswith(".json")), b"no JSON")
    with pytest.raises(TableDamaged, match=r"scd1/public/t cannot be read"):
        verify(pipeline)


def test_a_table_altered_during_the_comparison_is_a_transient_error(pipeline: Pipeline) -> None:
    pipeline.start("create table t (id int primary key, v text)", "insert into t values (1, 'a')")
    pipeline.sync()
    with moment_of(pipeline) as moment:
        pipeline.capture()
        pipeline.database.execute("truncate t")
        with pytest.raises(TransientError, match="altered during the comparison"):
            compare(pipeline, moment)


def test_the_wait_for_the_capture_of_the_comparison_point_is_limited(pipeline: Pipeline) -> None:
    pipeline.start("create table t (id int primary key)")
    pipeline.sync()
    with moment_of(pipeline) as moment:
        with pytest.raises(TransientError, match=f"read at {moment.lsn}, but test is captured"):
            wait_captured(pipeline.zone, moment, 0.1)


def test_an_open_transaction_delays_a_comparison_point_for_a_limited_time(
    pipeline: Pipeline,
) -> None:
    pipeline.start("create table t (id int primary key)")
    pipeline.sync()
    settings = pipeline.database.settings(lock_timeout_ms=300)
    with pipeline.database.connect(autocommit=False) as other, other.cursor() as cursor:
        cursor.execute("insert into t values (1)")
        with pytest.raises(TransientError, match="pg_terminate_backend"):
            with source_moment(settings, pipeline.zone, pipeline.slot):
                raise AssertionError("the slot cannot have been made")


def test_a_comparison_point_leaves_no_slot(pipeline: Pipeline) -> None:
    pipeline.start("create table t (id int primary key)")
    with moment_of(pipeline):
        slots = pipeline.database.query(
            "select slot_name from pg_replication_slots where database = current_database()"
        )
        assert slots == [(pipeline.slot,)]


@pytest.mark.soak
def test_the_limit_of_a_statement_does_not_apply_to_the_reading_of_a_table(
    pipeline: Pipeline,
) -> None:
    pipeline.start(
        "create table t (id int primary key, v text)",
        "insert into t select i, repeat(md5(i::text), 20) from generate_series(1, 100000) i",
    )
    pipeline.sync()
    with moment_of(pipeline) as moment:
        pipeline.capture()
        found = compare_at(
            pipeline.spark,
            pipeline.database.settings(statement_timeout_ms=250),
            pipeline.zone,
            PUBLICATION,
            CdcTable("public", "t"),
            moment,
        )
    assert found.is_equal


@pytest.mark.parametrize("is_small", [pytest.param(True, marks=SOAK), False])
def test_columns_that_the_source_has_dropped_are_not_compared(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, is_small: bool
) -> None:
    """Soft deletes keep them; a column that the source adds under the name is another one."""
    if not is_small:
        monkeypatch.setattr(small_table, "_SMALL_BYTES", 0)
    target = CdcTable("public", "t", soft_deletes=True)

    def compared() -> Comparison:
        with moment_of(pipeline) as moment:
            pipeline.capture()
            wait_captured(pipeline.zone, moment, 0)
            settings = pipeline.database.settings()
            return compare_at(pipeline.spark, settings, pipeline.zone, PUBLICATION, target, moment)

    pipeline.start(
        "create table t (id int primary key, v text, b int)",
        "insert into t select i, 'v', i from generate_series(1, 9) i",
    )
    pipeline.capture()
    pipeline.merge(None, target)
    pipeline.database.execute("alter table t drop column b; insert into t values (10, 'v')")
    pipeline.capture()
    pipeline.merge(None, target)
    assert pipeline.rows("t", "id, b")[8:] == [(9, 9), (10, None)]
    assert compared().is_equal
    pipeline.database.execute("update t set v = 'w' where id = 10; delete from t where id = 1")
    found = compared()
    assert found.is_equal, found
    assert found.source_rows == found.target_rows == 9
    pipeline.database.execute("alter table t add column b int; update t set v = 'x' where id = 2")
    found = compared()
    assert found.is_equal, found
