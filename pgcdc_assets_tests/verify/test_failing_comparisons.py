"""Comparisons that cannot be made: the error names the table, and the other tables are compared."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from pgcdc_assets.errors import (
    DefiniteError,
    PgcdcError,
    RawZoneError,
    TableDamaged,
    TransientError,
)
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets.tables.fence import fence_app_id, read_fence
from pgcdc_assets.verify import (
    Comparison,
    ComparisonFailure,
    compare_at,
    compare_digests,
    small_table,
    source_moment,
    target_at,
)
from pgcdc_assets_tests.support.database import create_database, drop_database
from pgcdc_assets_tests.support.merge.pipeline import PUBLICATION, Pipeline
from pgcdc_assets_tests.support.verify.comparison import compare, compare_all, moment_of, verify
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.spark]


def start(pipeline: Pipeline, *tables: str) -> None:
    """Start tables `id int primary key, v text` of three rows, and merge them."""
    pipeline.tables = tables
    for table in tables:
        pipeline.database.execute(f"create table {table} (id int primary key, v text)")
        pipeline.database.execute(f"insert into {table} values (1, 'a'), (2, 'b'), (3, 'c')")
    pipeline.start()
    pipeline.sync()


def data_files(pipeline: Pipeline, table: str) -> set[Path]:
    """Return the data files of the newest version of an SCD1 table."""
    return {Path(uri) for uri in DeltaTable(pipeline.path(table)).file_uris()}


@pytest.mark.sampled
@pytest.mark.parametrize("is_changed", [False, True])
@pytest.mark.parametrize("is_small", [True, False])
def test_a_table_with_a_lost_file_fails_alone(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, is_small: bool, is_changed: bool
) -> None:
    if not is_small:
        monkeypatch.setattr(small_table, "SMALL_ROWS", -1)
    start(pipeline, "t", "u")
    for file in data_files(pipeline, "t"):
        file.unlink()
    if is_changed:
        # The comparison folds these changes into copies, which share the files of the tables.
        pipeline.database.execute("update t set v = 'new'; update u set v = 'new'")
    with moment_of(pipeline) as moment:
        pipeline.capture()
        damaged, whole = compare_all(pipeline, moment)
    assert isinstance(damaged, ComparisonFailure)
    assert isinstance(damaged.error, TableDamaged), damaged.error
    assert pipeline.path("t") in str(damaged.error)
    assert "pgcdc rebuild test public.t" in str(damaged.error)
    assert isinstance(whole, Comparison) and whole.is_equal


def test_a_deleted_file_of_an_older_version_is_no_damage(pipeline: Pipeline) -> None:
    start(pipeline, "t")
    replaced = data_files(pipeline, "t")
    with moment_of(pipeline) as moment:
        pipeline.database.execute("update t set v = 'later'")
        pipeline.sync()
        replaced -= data_files(pipeline, "t")
        assert replaced
        for file in replaced:
            file.unlink()
        with pytest.raises(TransientError, match=r"public\.t .*old_version_hours"):
            compare(pipeline, moment)


def test_a_table_without_its_watermark_is_not_built_from_the_raw_zone(pipeline: Pipeline) -> None:
    """The table differs from the source, and a table from the raw zone does not."""
    start(pipeline, "t")
    table = DeltaTable(pipeline.path())
    zone = pipeline.zone
    fence = read_fence(zone.lake, table, pipeline.path(), zone.name)
    lost = Transaction(fence_app_id(zone.name), fence + 9)
    properties = CommitProperties(app_transactions=[lost])
    wrong = pa.Table.from_pylist([{"id": 9}], schema=pa.schema(table.schema().to_arrow()))
    write_deltalake(table, wrong, mode="append", commit_properties=properties)
    table = DeltaTable(pipeline.path())
    table.create_checkpoint()
    Path(pipeline.path(), "_delta_log", f"{table.version():020d}.json").unlink()
    with pytest.raises(TableDamaged, match="lost the commit with the newest watermark"):
        verify(pipeline)


def test_a_table_without_a_version_at_the_moment_is_not_built_from_the_raw_zone(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_at, "_VERSIONS", 1)
    start(pipeline, "t")
    with moment_of(pipeline) as moment:
        pipeline.database.execute("update t set v = 'later'")
        pipeline.sync()
        with pytest.raises(TransientError, match=r"public\.t was not compared: it is merged"):
            compare(pipeline, moment)


def test_a_copy_of_the_source_is_not_the_source(pipeline: Pipeline) -> None:
    """A database of the same server has the same LSNs, and a copy has the same rows."""
    start(pipeline, "t")
    copy = create_database(pipeline.database.server)
    try:
        with pytest.raises(RawZoneError, match=f"not from .* of database {copy.name}"):
            with source_moment(copy.settings(), pipeline.zone, pipeline.slot):
                raise AssertionError("the lake was filled from another database")
    finally:
        drop_database(copy)


@contextmanager
def interrupted(pipeline: Pipeline) -> Iterator[None]:
    """Interrupt the block like Ctrl-C while the source sums up a table."""

    def runs() -> bool:
        return bool(
            pipeline.database.query(
                "select 1 from pg_stat_activity where state = 'active' and query like "
                "'select substr(key_digest%' and application_name like 'pgcdc verify%'"
            )
        )

    def interrupt() -> None:
        wait_until(runs, "the sums of the source")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
        wait_until(lambda: not runs(), "the end of the statement")
    finally:
        thread.join()


def make_slow(pipeline: Pipeline) -> None:
    """Let the source need minutes for its rows."""
    pipeline.database.execute(f"drop publication {PUBLICATION}")
    pipeline.database.execute(
        f"create publication {PUBLICATION} for table t where (length(repeat(v, 50000000)) > 0)"
    )


def test_an_interrupt_ends_the_statement_of_the_source(pipeline: Pipeline) -> None:
    start(pipeline, "t")
    pipeline.database.execute("insert into t select i, 'x' from generate_series(10, 3000) i")
    pipeline.sync()
    make_slow(pipeline)
    with moment_of(pipeline) as moment:
        pipeline.capture()
        began = time.monotonic()
        with interrupted(pipeline):
            compare(pipeline, moment)
    assert time.monotonic() - began < 30


def test_the_statement_of_the_source_ends_with_the_failure_of_its_table(pipeline: Pipeline) -> None:
    start(pipeline, "t")
    pipeline.database.execute("insert into t select i, 'x' from generate_series(10, 3000) i")
    pipeline.sync()
    make_slow(pipeline)
    for file in data_files(pipeline, "t"):
        file.unlink()
    with moment_of(pipeline) as moment:
        pipeline.capture()
        began = time.monotonic()
        with pytest.raises(TableDamaged):
            compare(pipeline, moment)
    assert time.monotonic() - began < 30


@pytest.mark.sampled
def test_kept_rows_of_detached_partitions_hide_no_difference(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buckets that are compared first differ by kept rows only."""
    monkeypatch.setattr(compare_digests, "_ROWS_A_PASS", 1)
    monkeypatch.setattr(compare_digests, "_PASSES", 1)
    table = CdcTable("public", "p", on_detached_partition="keep")
    pipeline.database.execute(
        "create table p (id int primary key, v text) partition by range (id);"
        "create table old partition of p for values from (1000) to (2000);"
        "create table rest partition of p for values from (0) to (1000);"
        "insert into p select i, 'a' from generate_series(900, 1200) i;"
        f"create publication {PUBLICATION} for table p with (publish_via_partition_root)"
    )
    pipeline.copy()
    pipeline.capture()
    pipeline.merge(None, table)
    pipeline.database.execute("alter table p detach partition old")
    pipeline.capture()
    # The last of the buckets, which are named by the first digit of the key's digest.
    wrong = max(range(900, 1000), key=lambda id: hashlib.md5(f"3:{id}".encode()).hexdigest())
    pipeline.spark.sql(
        f"UPDATE {delta_table(pipeline.path('p'))} SET v = 'wrong' WHERE id = {wrong}"
    )
    with moment_of(pipeline) as moment:
        pipeline.capture()
        found = compare_at(
            pipeline.spark,
            pipeline.database.settings(),
            pipeline.zone,
            PUBLICATION,
            table,
            moment,
        )
    assert found.kept > 0
    assert found.differing == 1
    assert not found.is_equal


@pytest.mark.sampled
def test_a_column_that_was_changed_by_hand_is_a_definite_error_without_its_values(
    pipeline: Pipeline,
) -> None:
    """The text of `_deleted` cannot be the condition of deleted rows, and Spark quotes it."""
    start(pipeline, "t")
    table = delta_table(pipeline.path())
    pipeline.spark.sql(f"ALTER TABLE {table} ADD COLUMNS (_deleted STRING)")
    pipeline.spark.sql(f"UPDATE {table} SET _deleted = 'sesame'")
    with pytest.raises(DefiniteError, match=r"public\.t .*altered by hand") as failed:
        verify(pipeline)
    assert "sesame" not in str(failed.value)


def test_errors_of_tables_are_errors_of_the_package(pipeline: Pipeline) -> None:
    start(pipeline, "t")
    for file in data_files(pipeline, "t"):
        file.write_bytes(b"no parquet")
    with moment_of(pipeline) as moment:
        pipeline.capture()
        with pytest.raises(PgcdcError, match="missing or damaged"):
            compare(pipeline, moment)
