"""Very large transactions and rows (A15, D16, H6)."""

from __future__ import annotations

import numpy as np
import pyarrow.compute as pc
import pytest

from pgcdc_assets_tests.support.captures import Capturing
from pgcdc_assets_tests.support.merge.pipeline import Pipeline
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = pytest.mark.postgres

# Each insert is a subtransaction, and every second subtransaction is rolled back.
SUBTRANSACTIONS = """
do $$ begin
    insert into t select generate_series(1, {rows});
    for i in 1..{subtransactions} loop
        begin
            insert into t values (-i);
            if i % 2 = 0 then raise exception 'undone'; end if;
        exception when raise_exception then null;
        end;
    end loop;
end $$
"""

LARGE_ROW = "insert into t values (1, repeat(md5('x'), 6250000))"


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize(
    ("rows", "timeout"),
    [
        pytest.param(100_000, 3, id="200 MB"),
        pytest.param(1_050_000, 5, id="2 GB", marks=pytest.mark.soak),
    ],
)
def test_a_large_transaction_completes_under_a_short_sender_timeout(
    capturing: Capturing, rows: int, timeout: float
) -> None:
    """A15."""
    capturing.begin("create table t (id int, filler text)")
    capturing.database.execute(
        "insert into t select i, repeat(md5(i::text), 60) from generate_series(1, %s) i", (rows,)
    )

    report = capturing.with_sender_timeout(timeout).capture()

    assert report.row_count == rows
    assert report.bytes_received > 1900 * rows


@pytest.mark.sampled
@pytest.mark.every_pg
@pytest.mark.parametrize(
    ("rows", "subtransactions"),
    [
        pytest.param(100_000, 2_000, id="small"),
        pytest.param(10_000_000, 50_000, id="large", marks=pytest.mark.soak),
    ],
)
def test_a_transaction_of_many_rows_and_subtransactions_is_landed_in_little_memory(
    capturing: Capturing, rows: int, subtransactions: int
) -> None:
    """H6: rolled back rows never arrive, and the slot's position is the window's end."""
    capturing.begin("create table t (id int)")
    start = capturing.confirmed()
    capturing.database.execute(SUBTRANSACTIONS.format(rows=rows, subtransactions=subtransactions))
    window = capturing.window()

    done = capturing.capture_process(window, timeout=800)

    count, already_captured, peak_mb = done.stdout.split()
    assert (int(count), already_captured) == (rows + subtransactions // 2, "False"), done.stderr
    assert int(peak_mb) < 1000
    table = capturing.zone.changes.table.load()
    assert table is not None
    landed = table.to_pyarrow_table(columns=["new", "commit_lsn", "ordinal"])
    in_order = landed["ordinal"].to_numpy().argsort()
    ids = pc.list_flatten(landed["new"]).cast("int64").to_numpy()[in_order]
    expected = np.concatenate([np.arange(1, rows + 1), -np.arange(1, subtransactions, 2)])
    assert np.array_equal(ids, expected)
    assert len(pc.unique(landed["commit_lsn"])) == 1
    assert start < capturing.confirmed() == window.end


@pytest.mark.sampled
def test_a_table_of_800_columns_is_captured_in_little_memory(capturing: Capturing) -> None:
    """D16: a batch is bounded by its values as well as by its bytes."""
    nulls = ", ".join(f"c{number} int" for number in range(799))
    capturing.begin(f"create table t (id int, {nulls})")
    rows = 30_000
    capturing.database.execute(f"insert into t select generate_series(1, {rows})")

    done = capturing.capture_process(capturing.window())

    count, _, peak_mb = done.stdout.split()
    assert int(count) == rows, done.stderr
    assert int(peak_mb) < 550


@pytest.mark.sampled
def test_a_row_of_200_mb_lands_and_the_stream_continues(capturing: Capturing) -> None:
    """D16."""
    capturing.begin("create table t (id int, v text)")
    capturing.database.execute(LARGE_ROW)
    capturing.database.execute("insert into t values (2, 'b')")

    window = capturing.window()
    done = capturing.capture_process(window)

    assert done.stdout.split()[0] == "2", done.stderr
    table = capturing.zone.changes.table.load()
    assert table is not None
    values = pc.list_element(table.to_pyarrow_table(columns=["new"])["new"].combine_chunks(), 1)
    assert sorted(pc.binary_length(values).to_pylist()) == [1, 200_000_000]
    assert capturing.confirmed() == window.end


@pytest.mark.spark
@pytest.mark.soak
def test_a_row_of_200_mb_is_merged_with_the_default_heap(
    pipeline: Pipeline,
) -> None:
    """D16."""
    pipeline.start("create table t (id int primary key, v text)", "insert into t values (0, 'a')")
    pipeline.database.execute(LARGE_ROW)
    pipeline.database.execute("insert into t values (2, 'b')")
    pipeline.sync()
    pipeline.assert_equal()


@pytest.mark.parametrize(("memory", "is_spilled"), [("64kB", True), ("64MB", False)])
def test_the_connection_string_sets_the_memory_of_the_servers_decoding(
    capturing: Capturing, memory: str, is_spilled: bool
) -> None:
    capturing.begin("create table t (id int)")
    capturing.database.execute("insert into t select generate_series(1, 5000)")
    options = f"-c logical_decoding_work_mem={memory}"
    capturing.through(f"{capturing.conninfo} options='{options}'").capture()
    query = (
        "select total_txns > 0, spill_txns > 0 from pg_stat_replication_slots where slot_name = %s"
    )
    wait_until(
        lambda: capturing.database.query(query, (capturing.slot,)) == [(True, is_spilled)],
        "the statistics of the slot",
    )
    assert len(capturing.rows()) == 5000


@pytest.mark.sampled
@pytest.mark.usefixtures("wire")
def test_a_transaction_timeout_of_the_role_does_not_end_the_stream(capturing: Capturing) -> None:
    """Decoding is a transaction of the walsender, which `transaction_timeout` (PG 17) would end."""
    capturing.begin("create table t (id int)")
    if capturing.database.server.version < 17:
        pytest.skip("transaction_timeout exists since Postgres 17")
    capturing.database.execute("insert into t select generate_series(1, 600000)")
    limited = capturing.through(f"{capturing.conninfo} options='-c transaction_timeout=300'")

    assert limited.capture().row_count == 600_000
