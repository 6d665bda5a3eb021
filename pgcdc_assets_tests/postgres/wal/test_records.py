"""Commit records are found in real WAL as pg_waldump finds them."""

from __future__ import annotations

import random
import re
from itertools import pairwise

import pytest

from pgcdc_assets.demo.programs import run_program
from pgcdc_assets.errors import ConfigurationError, DefiniteError, TransientError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.wal.records import LONGEST_HEADER_BYTES, WalRange
from pgcdc_assets.postgres.wal.stream import read_wal
from pgcdc_assets_tests.support.database import Database

pytestmark = pytest.mark.postgres

_PAGE, _SEGMENT = 8192, 16 * 1024 * 1024
_RECORD = re.compile(r"rmgr: (\w+).* lsn: (\S+), prev \S+, desc: (\w+)")


def _flushed(database: Database) -> Lsn:
    database.transaction("set local synchronous_commit = on", "create temporary table flushed ()")
    return Lsn.parse(database.value("select pg_current_wal_flush_lsn()::text"))


def _records(database: Database, start: Lsn, end: Lsn) -> list[tuple[Lsn, bool]]:
    """Return the LSN of each record, and whether the record is a commit."""
    program = database.server.bin_dir / "pg_waldump"
    if not program.exists():
        pytest.skip(f"the programs of Postgres {database.server.version} lack pg_waldump")
    status, said = run_program(
        program,
        *("-p", str(database.server.data_dir / "pg_wal"), "-s", str(start), "-e", str(end)),
    )
    found = [match.groups() for match in map(_RECORD.match, said.splitlines()) if match]
    assert found, (status, said)
    return [
        (Lsn.parse(lsn), rmgr == "Transaction" and name in ("COMMIT", "COMMIT_PREPARED"))
        for rmgr, lsn, name in found
    ]


def _fill_a_page(database: Database) -> None:
    """Write records until one ends with its page, so that the next begins behind a page header."""
    with database.connect() as conn, conn.cursor() as cursor:

        def emit(size: int) -> int:
            cursor.execute(
                "select pg_logical_emit_message(false, 'x', repeat('m', %s))::text", (size,)
            )
            row = cursor.fetchone()
            assert row is not None
            return Lsn.parse(row[0]) % _PAGE

        for _ in range(2000):
            begin = emit(40)
            overhead = (emit(40) - begin) % _PAGE - 40
            left = _PAGE - (begin + overhead + 40) % _PAGE - overhead
            if 0 < left < 200 and emit(left) in (0, 24):
                return
    raise AssertionError("no record ends with its page")


@pytest.mark.sampled
@pytest.mark.every_pg
def test_the_commit_records_of_real_wal_are_found(database: Database, seed: int) -> None:
    choose = random.Random(seed)
    start = _flushed(database)
    database.execute("create table t (id int, note text)")
    for _ in range(150):
        size = choose.choice([1, 30, 700, 8000, 8168, 40_000])
        database.execute(f"select pg_logical_emit_message(false, 'x', repeat('m', {size}))")
        outcome = choose.choice(["commit", "rollback"])
        database.execute(f"begin; savepoint a; insert into t values (1, 'x'); {outcome}")
    _fill_a_page(database)
    database.execute("insert into t values (3)")
    # The rest of the segment has no records.
    database.execute("select pg_switch_wal()")
    database.execute("insert into t values (2)")
    end = _flushed(database)
    records = _records(database, start, end)
    wal = WalRange(start, read_wal(database.settings(), 1, start, end), _PAGE, _SEGMENT)
    assert len(wal.data) == end - start
    assert {is_commit for _, is_commit in records} == {True, False}
    assert any(lsn % _SEGMENT == 40 for lsn, _ in records)
    assert any(lsn % _PAGE == 24 for lsn, _ in records)
    for lsn, is_commit in records:
        assert wal.has_commit(lsn, lsn) == is_commit
        # The end of a record that fills its page is before the header of the next page.
        header = {40: 40 if lsn % _SEGMENT == 40 else 0, 24: 24}.get(lsn % _PAGE, 0)
        assert wal.has_commit(Lsn(lsn - header), Lsn(lsn - header)) == is_commit
    commits = [lsn for lsn, is_commit in records if is_commit]
    for earlier, later in pairwise(commits):
        between = [lsn for lsn, _ in records if earlier < lsn < later]
        if between:
            assert not wal.has_commit(between[0], between[-1])
            assert wal.has_commit(between[0], later)
    last = records[-1][0]
    cut = WalRange(start, wal.data[: last - start + 23], _PAGE, _SEGMENT)
    assert not cut.has_commit(last, last)
    with pytest.raises(DefiniteError, match="unknown format"):
        wal.has_commit(Lsn(records[3][0] + 8), end)
    assert LONGEST_HEADER_BYTES == 88


def test_wal_that_a_server_does_not_send_is_an_error_with_a_remedy(database: Database) -> None:
    start = _flushed(database)
    settings = database.settings()
    assert read_wal(settings, 1, start, start) == b""
    with pytest.raises(TransientError, match=r"0/100 to 0/200: .* removed"):
        read_wal(settings, 1, Lsn(0x100), Lsn(0x200))
    with pytest.raises(TransientError, match="ahead of the WAL flush position"):
        read_wal(settings, 1, Lsn(start + (1 << 30)), Lsn(start + (1 << 30) + 8))
    with pytest.raises(ConfigurationError, match="timeline 7"):
        read_wal(settings, 7, start, Lsn(start + 8))
