"""The copy of a table, beside ADBC and a discarded COPY, and its memory with wide rows.

Five sides run in turns, each as a process, with one embedded server over loopback TCP. All sides
are timed from the first connection, without the start of the process:

`copy`: COPY text decoded by numpy to `list<large_string>` batches, as the snapshot does it.
`adbc`: the same batches by ADBC from `select array[textin(OUT(column)), ...]`, because
`column::text` has other texts for bool, char(n), inet and "char".
`adbc_typed`: `select *` by ADBC: binary COPY to ADBC's Arrow types of the columns. This is less
work: numeric and jsonb are texts without their types, and a value that Arrow cannot hold (infinity,
years BC) ends the query or becomes another value.
`sink`: psycopg2's COPY with discarded rows, which is the maximum rate of the server.
`land`: `copy` written and committed to the raw zone.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import adbc_driver_postgresql.dbapi as adbc
import pyarrow as pa
from psycopg2 import sql

from benchmarks.copied_orders import ORDERS, Discarded
from benchmarks.results import Result
from benchmarks.scale import scaled
from benchmarks.source import log
from benchmarks.turns import in_turns
from pgcdc_assets.demo.server import UNSAFE_BUT_FAST, EmbeddedServer
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.catalog.relations import PublishedTable, published_tables
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.postgres.copy.reader import copy_published
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone

REPETITIONS = 5
_ROWS = scaled(500_000)
_WIDE_ROWS = scaled(1_000_000)

_TABLES = (
    ORDERS.format(name="orders", rows=_ROWS)
    + f""";
create table wide as
select i as id, repeat(md5(i::text), 60) as note, repeat('back\\slash ', 20) as path
  from generate_series(1, {_WIDE_ROWS}) i;
create publication benchmark for table orders, wide;
vacuum analyze
"""
)

_OUTPUT_FUNCTIONS = """
select a.attname, t.typoutput::text
  from pg_attribute a join pg_type t on t.oid = a.atttypid
 where a.attrelid = %s and a.attnum > 0 and not a.attisdropped order by a.attnum
"""


def _table(settings: ConnectionSettings, name: str) -> PublishedTable:
    with query_connection(settings, "bench") as conn:
        return next(t for t in published_tables(conn, "benchmark") if t.relation.table == name)


def _snapshot(conn: Any) -> str:
    with conn.cursor() as cursor:
        cursor.execute("begin isolation level repeatable read")
        cursor.execute("select pg_export_snapshot()")
        return str(cursor.fetchone()[0])


def _copied(settings: ConnectionSettings, name: str) -> Iterator[pa.RecordBatch]:
    with query_connection(settings, "bench") as conn:
        yield from copy_published(settings, _table(settings, name), _snapshot(conn))


def _copy(settings: ConnectionSettings, name: str) -> int:
    return sum(batch.num_rows for batch in _copied(settings, name))


def _land(settings: ConnectionSettings, name: str) -> int:
    with TemporaryDirectory() as folder:
        zone = RawZone(Lake(folder), "bench")
        relation = _table(settings, name).relation
        return zone.snapshots.land_snapshot(1, Lsn(1), relation, 1, _copied(settings, name))


def _adbc(settings: ConnectionSettings, name: str) -> int:
    table = _table(settings, name).relation
    with query_connection(settings, "bench") as conn, conn.cursor() as cursor:
        cursor.execute(_OUTPUT_FUNCTIONS, (table.relation_id,))
        texts = [
            sql.SQL("textin({}({}))").format(sql.Identifier(out), sql.Identifier(column))
            for column, out in cursor.fetchall()
        ]
        statement = sql.SQL("select array[{}] from {}").format(
            sql.SQL(", ").join(texts), sql.Identifier(table.schema, table.table)
        )
        query = statement.as_string(conn)
    return _adbc_rows(settings, query)


def _adbc_typed(settings: ConnectionSettings, name: str) -> int:
    query = sql.SQL("select * from {}").format(sql.Identifier("public", name))
    with query_connection(settings, "bench") as conn:
        return _adbc_rows(settings, query.as_string(conn))


def _adbc_rows(settings: ConnectionSettings, query: str) -> int:
    parts = settings.parameters()
    uri = f"postgresql://{parts['user']}@{parts['host']}:{parts['port']}/{parts['dbname']}"
    with adbc.connect(uri) as connection, connection.cursor() as adbc_cursor:
        adbc_cursor.execute(query)
        return sum(batch.num_rows for batch in adbc_cursor.fetch_record_batch())


def _sink(settings: ConnectionSettings, name: str) -> int:
    nothing = Discarded()
    with (
        query_connection(settings, "bench", statement_timeout_ms=0) as conn,
        conn.cursor() as cursor,
    ):
        cursor.copy_expert(
            sql.SQL("copy {} to stdout").format(sql.Identifier("public", name)), nothing
        )
    return nothing.rows


_SIDES: dict[str, Callable[[ConnectionSettings, str], int]] = {
    "copy": _copy,
    "adbc": _adbc,
    "adbc_typed": _adbc_typed,
    "sink": _sink,
    "land": _land,
}


def _run_side(side: str, conninfo: str, table: str) -> dict[str, float]:
    before = resource.getrusage(resource.RUSAGE_SELF)
    began = time.perf_counter()
    rows = _SIDES[side](ConnectionSettings(conninfo, "bench"), table)
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "rows": rows,
        "rows_per_second": rows / seconds,
        "cpu": cpu,
        "rss_mb": after.ru_maxrss / 1024,
        "start_rss_mb": before.ru_maxrss / 1024,
    }


def _in_process(side: str, conninfo: str, table: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.table_copy", side, conninfo, table]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def run() -> Iterator[Result]:
    """Measure all sides."""
    samples: dict[str, list[dict[str, float]]] = {side: [] for side in _SIDES}
    with TemporaryDirectory(prefix="pgcdc-bench-copy-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        server = EmbeddedServer(Path(folder) / "data", 18, UNSAFE_BUT_FAST)
        try:
            conninfo = server.start().conninfo()
            _make_tables(ConnectionSettings(conninfo, "bench"))
            sides = {side: partial(_in_process, side, conninfo, "orders") for side in _SIDES}
            for number in range(REPETITIONS):
                for side, found in in_turns(sides, number).items():
                    samples[side].append(found)
                    log(
                        f"{side:10} {found['rows_per_second'] / 1e3:6.0f} k rows/s"
                        f"  cpu {found['cpu']:.1f} s  memory {found['rss_mb']:.0f} MB"
                    )
            wide = _in_process("land", conninfo, "wide")
        finally:
            server.remove()
    speed = {side: [one["rows_per_second"] for one in series] for side, series in samples.items()}
    yield Result.of("table_copy_vs_adbc", speed["copy"], speed["adbc"], "rows/s")
    yield Result.of("table_copy_vs_adbc_typed", speed["copy"], speed["adbc_typed"], "rows/s")
    yield Result.of("table_copy_vs_copy_to_nothing", speed["copy"], speed["sink"], "rows/s")
    yield Result.of("table_copy_landed_vs_copy_to_nothing", speed["land"], speed["sink"], "rows/s")
    memory = [one["rss_mb"] for one in samples["land"]]
    yield Result.reported("table_copy_peak_memory", memory, "MB")
    yield Result.reported("table_copy_peak_memory_wide_rows", [wide["rss_mb"]], "MB")


def _make_tables(settings: ConnectionSettings) -> None:
    with query_connection(settings, "bench", statement_timeout_ms=0) as conn:
        for statement in _TABLES.split(";"):
            with conn.cursor() as cursor:
                cursor.execute("set search_path = public")
                cursor.execute(statement)


if __name__ == "__main__":
    print(json.dumps(_run_side(*sys.argv[1:])))
