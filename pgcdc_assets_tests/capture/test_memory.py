"""The memory of a capture of wide rows, of huge values and of many relations (D16)."""

from __future__ import annotations

import pyarrow.compute as pc
import pytest

from pgcdc_assets.errors import DefiniteError
from pgcdc_assets_tests.support.captures import Capturing

pytestmark = [pytest.mark.postgres, pytest.mark.slow]


@pytest.mark.sampled
def test_rows_of_many_large_values_are_captured_in_little_memory(capturing: Capturing) -> None:
    """A row has 2 MB in 200 columns, and all rows together have 300 MB."""
    columns = ", ".join(f"c{number} text" for number in range(200))
    capturing.begin(f"create table t (id int, {columns})")
    values = ", ".join(f"repeat('{number % 10}', 10000)" for number in range(200))
    capturing.database.execute(f"insert into t select i, {values} from generate_series(1, 150) i")
    done = capturing.capture_process(capturing.window())
    count, _, peak_mb = done.stdout.split()
    assert int(count) == 150, done.stderr
    assert int(peak_mb) < 700


@pytest.mark.parametrize(
    "tables", [1000, pytest.param(10_000, marks=pytest.mark.soak, id="10,000")]
)
def test_many_relations_are_captured_in_little_memory(capturing: Capturing, tables: int) -> None:
    """Each table is announced, and is described in raw/relations."""
    capturing.begin()
    for first in range(0, tables, 500):
        names = range(first, min(first + 500, tables))
        capturing.database.execute(
            "; ".join(f"create table t{n} (id int primary key, note text)" for n in names)
        )
        capturing.database.execute("; ".join(f"insert into t{n} values (1, 'a')" for n in names))
    done = capturing.capture_process(capturing.window(), timeout=800)
    count, _, peak_mb = done.stdout.split()
    assert int(count) == tables, done.stderr
    assert int(peak_mb) < 700
    assert len({row["table"] for row in capturing.rows()}) == tables


@pytest.mark.parametrize("megabytes", [100, pytest.param(900, marks=pytest.mark.soak, id="900 MB")])
def test_a_huge_value_is_landed_within_a_multiple_of_its_size(
    capturing: Capturing, megabytes: int
) -> None:
    """`docs/reference/limits.md` states the multiple."""
    capturing.begin("create table t (id int, v text)")
    capturing.database.execute(
        "insert into t values (1, repeat('x', %s)), (2, 'b')", (megabytes * 1_000_000,)
    )
    done = capturing.capture_process(capturing.window(), timeout=800)
    assert done.stdout.split()[:1] == ["2"], done.stderr
    peak_mb = int(done.stdout.split()[2])
    assert peak_mb < 400 + 5 * megabytes
    table = capturing.zone.changes.table.load()
    assert table is not None
    values = pc.list_element(table.to_pyarrow_table(columns=["new"])["new"].combine_chunks(), 1)
    assert sorted(pc.binary_length(values).to_pylist()) == [1, megabytes * 1_000_000]


@pytest.mark.soak
def test_a_row_that_exceeds_a_message_of_the_server_is_refused(capturing: Capturing) -> None:
    """A message has 1 GB at most, so no program can read the row from a slot."""
    capturing.begin("create table t (id int, v bytea)")
    confirmed = capturing.confirmed()
    # As text, each byte has two digits.
    capturing.database.execute("insert into t values (1, repeat('x', 600000000)::bytea)")
    with pytest.raises(DefiniteError, match=r"cannot print a row .*renew --name test"):
        capturing.capture()
    assert capturing.confirmed() == confirmed
