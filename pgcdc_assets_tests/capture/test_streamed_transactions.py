"""The raw rows of streamed transactions equal those of whole transactions, on real servers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pgcdc_assets.capture.spool import TransactionSpool
from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.postgres.catalog.relation_resolver import CatalogResolver
from pgcdc_assets.postgres.connection import query_connection
from pgcdc_assets.postgres.stream.connection import ReplicationStream
from pgcdc_assets.postgres.stream.plugin_options import PluginOptions, Streaming
from pgcdc_assets.postgres.stream.request import StreamSettings
from pgcdc_assets.protocol.relation import Relation
from pgcdc_assets.protocol.streaming_decoder import StreamingDecoder
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.streamed_captures import payloads, read_window
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.every_pg]

FAR = Lsn(2**62)

SCHEMA = """
    create type mood as enum ('sad', 'happy');
    create table a (id int primary key, note text, mood mood);
    create table b (id int primary key, long text);
    alter table b replica identity full;
    create table c (id int);
    create publication pub for all tables;
"""


@pytest.fixture
def slots(database: Database) -> tuple[str, str]:
    """Create the tables and two slots. The server sends small blocks."""
    database.execute(SCHEMA)
    database.execute(f"alter database {database.name} set logical_decoding_work_mem = '64kB'")
    names = f"{database.name}_off", f"{database.name}_on"
    for slot in names:
        database.value("select pg_create_logical_replication_slot(%s, 'pgoutput')", (slot,))
    return names


class Session:
    """A session that runs one transaction beside others."""

    def __init__(self, stack: ExitStack, database: Database) -> None:
        self._connection = stack.enter_context(database.connect(autocommit=False))
        self._cursor = stack.enter_context(self._connection.cursor())
        # The server may report a commit before its WAL is flushed and decoded.
        self.run("set local synchronous_commit = on")

    def run(self, *statements: str) -> None:
        for statement in statements:
            self._cursor.execute(statement)

    def fill(self, table: str, first: int, count: int) -> None:
        """Insert rows of about 1 kB each."""
        columns = "id, note" if table == "a" else "id, long"
        self.run(
            f"insert into {table} ({columns}) select i, repeat(md5(i::text), 30) "
            f"from generate_series({first}, {first + count - 1}) i"
        )

    def commit(self) -> None:
        self._connection.commit()
        self.run("set local synchronous_commit = on")

    def rollback(self) -> None:
        self._connection.rollback()
        self.run("set local synchronous_commit = on")


def check_alternating(delimiters: list[bytes]) -> None:
    """Check that blocks of at least two transactions alternate."""
    xids = [xid for xid, _ in groupby(m[1:5] for m in delimiters if m[:1] == b"S")]
    assert len(xids) > len(set(xids)) >= 2


def work(database: Database, before_abort: Callable[[], None] = lambda: None) -> None:
    """Run large transactions side by side, with subtransactions, aborts and schema changes."""
    with ExitStack() as stack:
        one, two, three, small = (Session(stack, database) for _ in range(4))
        one.fill("a", 1, 300)
        two.fill("b", 1, 300)
        one.run("savepoint s1")
        one.fill("a", 1001, 200)
        one.run("savepoint s2")
        one.fill("b", 5001, 200)
        before_abort()
        one.run("rollback to s1")
        one.fill("a", 2001, 200)
        one.run("select pg_logical_emit_message(true, 'outbox', 'in a block')")
        small.run("insert into c values (1)")
        small.commit()
        two.run("update b set long = long || 'x' where id <= 100", "delete from b where id > 250")
        three.fill("a", 9001, 400)
        before_abort()
        three.rollback()
        two.run("savepoint s", "alter table b add extra int default 7")
        two.run(
            "insert into b (id, long) select i, repeat('y', 900) from generate_series(8000,8200) i"
        )
        before_abort()
        two.run("rollback to s")
        two.fill("b", 6001, 200)
        three.run("alter table c add more text", "insert into c values (2, 'two')")
        three.commit()
        two.commit()
        small.run("insert into c values (3, 'three')", "insert into b values (-1, 'small')")
        small.commit()
        one.run("truncate c")
        one.fill("a", 3001, 300)
        one.run("update a set mood = 'happy' where id < 50")
        one.commit()
        small.run("insert into a values (-1, 'last', 'sad')")
        small.run("create temporary table flushed ()")
        small.commit()


def capture(
    database: Database, folder: Path, slot: str, streaming: Streaming, end: Lsn
) -> tuple[list[dict[str, Any]], TransactionSpool, list[bytes]]:
    """Land the slot's rows through `end`; return them with the spool and the delimiters."""
    zone = RawZone(Lake(str(folder / slot)), "t")
    start = Lsn.parse(
        database.value(
            "select confirmed_flush_lsn::text from pg_replication_slots where slot_name = %s",
            (slot,),
        )
    )
    window = LsnWindow.of(1, start, end)
    settings = database.settings()
    stream_settings = StreamSettings(plugin=PluginOptions(streaming))
    delimiters: list[bytes] = []

    def watch(message: bytes) -> None:
        if message[:1] in (b"S", b"c", b"A"):
            delimiters.append(message)

    with (
        query_connection(settings, "test") as conn,
        TransactionSpool(folder / "spool", memory_bytes=200_000) as spool,
        ReplicationStream(settings, slot, "pub", start, stream_settings) as stream,
    ):
        catalog = CatalogResolver(
            settings, conn, "pub", lambda oid: zone.relations.registered(1, oid)
        )

        def resolve(
            announced: Relation, lsn: Lsn, xid: int, is_for_row: bool
        ) -> tuple[Relation, int]:
            relation = catalog.complete(announced, lsn, xid).relation
            return relation, zone.relations.register(1, relation, lsn)

        decoder = StreamingDecoder(resolve, spool, end, start)
        zone.changes.land(window, read_window(stream, decoder, watch), zone.relations.flush)
        stream.confirm(end)
        stream.finish()
    table = zone.changes.table.load()
    assert table is not None
    rows = table.to_pyarrow_table().drop_columns(["window"]).to_pylist()
    return sorted(rows, key=lambda r: (r["commit_lsn"], r["ordinal"])), spool, delimiters


@pytest.mark.parametrize(
    "mode", [Streaming.ON, pytest.param(Streaming.PARALLEL, marks=pytest.mark.soak)]
)
def test_raw_rows_are_equal_with_and_without_streaming(
    database: Database, slots: tuple[str, str], tmp_path: Path, mode: Streaming
) -> None:
    version = int(database.value("show server_version_num"))
    if mode is Streaming.PARALLEL and version < 160000:
        with pytest.raises(ConfigurationError, match="Postgres 16"):
            PluginOptions(mode).clause("pub", version)
        return
    work(database)
    end = Lsn.parse(database.value("select pg_current_wal_flush_lsn()::text"))

    whole, unused, none = capture(database, tmp_path, slots[0], Streaming.OFF, end)
    streamed, spool, delimiters = capture(database, tmp_path, slots[1], mode, end)

    assert streamed == whole
    assert len(whole) > 1400
    assert {row["op"] for row in whole} == {"I", "U", "D", "T", "M"}
    assert (unused.written_bytes, none) == (0, [])
    assert spool.written_bytes > 0
    check_alternating(delimiters)
    assert list((tmp_path / "spool").glob("[0-9]*")) == []


class LiveStream:
    """A stream that a thread decodes while the transactions run."""

    def __init__(self, database: Database, folder: Path, slot: str, mode: Streaming) -> None:
        self.delimiters: list[bytes] = []
        self.rows: list[dict[str, Any]] = []
        self.decoded_through = 0
        self.error: BaseException | None = None
        self._database, self._folder, self._slot, self._mode = database, folder, slot, mode
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> LiveStream:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join(30)
        assert not self._thread.is_alive()

    def catch_up(self) -> None:
        """Wait until the server has decoded all WAL, and the stream has read the result."""
        target = Lsn.parse(self._database.value("select pg_current_wal_insert_lsn()::text"))
        # The server decodes flushed WAL only.
        self._database.transaction(
            "set local synchronous_commit = on", "create temporary table flushed ()"
        )
        wait_until(
            lambda: self.decoded_through >= target or self.error is not None,
            f"the stream to reach {target}",
        )
        assert self.error is None

    def _run(self) -> None:
        try:
            for batch in self._batches():
                self.rows += batch.to_pylist()
        except BaseException as error:
            self.error = error

    def _batches(self) -> Iterator[pa.RecordBatch]:
        def resolve(
            announced: Relation, lsn: Lsn, xid: int, is_for_row: bool
        ) -> tuple[Relation, int]:
            return announced, len(announced.columns)

        with (
            TransactionSpool(self._folder / "spool", memory_bytes=200_000) as spool,
            ReplicationStream(
                self._database.settings(),
                self._slot,
                "pub",
                Lsn(0),
                StreamSettings(status_seconds=0.1, plugin=PluginOptions(self._mode)),
            ) as stream,
        ):
            decoder = StreamingDecoder(resolve, spool, FAR)
            for batch in stream.batches():
                yield from decoder.decode(batch)
                for message in payloads(batch):
                    if message[:1] == b"k":
                        self.decoded_through = int.from_bytes(message[1:9], "big")
                    elif message[25:26] in (b"S", b"c", b"A"):
                        self.delimiters.append(message[25:])
                if self._stop.is_set():
                    return


@pytest.mark.parametrize("mode", [Streaming.ON, Streaming.PARALLEL])
def test_transactions_that_abort_after_their_blocks_never_land(
    database: Database, slots: tuple[str, str], tmp_path: Path, mode: Streaming
) -> None:
    """Postgres 18 does not stream a transaction that it knows to be aborted."""
    if mode is Streaming.PARALLEL and int(database.value("show server_version_num")) < 160000:
        pytest.skip("streaming parallel requires Postgres 16")
    with LiveStream(database, tmp_path, slots[1], mode) as live:
        work(database, live.catch_up)
        live.catch_up()
    with LiveStream(database, tmp_path, slots[0], Streaming.OFF) as whole:
        whole.catch_up()

    assert live.rows == whole.rows
    assert len(live.rows) > 1400
    assert whole.delimiters == []
    check_alternating(live.delimiters)
    aborts = [m for m in live.delimiters if m[:1] == b"A"]
    assert {len(m) for m in aborts} == {25 if mode is Streaming.PARALLEL else 9}
    assert {m[1:5] == m[5:9] for m in aborts} == {True, False}
