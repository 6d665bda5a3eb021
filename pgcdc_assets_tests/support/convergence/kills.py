"""Captures that are killed at random, beside random transactions, and the count of their rows.

Each capture is a fork of this process, so that a kill costs no imports. As a program, it runs a
number of kills against a new server, and prints the counts:

    python -m pgcdc_assets_tests.support.convergence.kills --kills 1000
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.errors import TransientError
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.postgres.stream import start as stream_start
from pgcdc_assets.postgres.stream import tls_transport
from pgcdc_assets.postgres.stream.plugin_options import PluginOptions, Streaming
from pgcdc_assets.protocol.logical_messages import NO_TRANSACTION
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings.policies import MessagePolicy
from pgcdc_assets_tests.support import capture_failpoints
from pgcdc_assets_tests.support.certificates import Certificates
from pgcdc_assets_tests.support.convergence.oracle import (
    create_oracle,
    expected_changes,
    expected_messages,
    landed_changes,
)
from pgcdc_assets_tests.support.convergence.sync_process import LIMITS, capture, copy
from pgcdc_assets_tests.support.convergence.workload import TABLES, Workload
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.encoded import encoded_database
from pgcdc_assets_tests.support.server_folder import new_server_folder
from pgcdc_assets_tests.support.servers import SETTINGS
from pgcdc_assets_tests.support.tls_server import tls_fronts

FAILPOINTS = (*capture_failpoints.MID_STREAM, *capture_failpoints.TWO_PHASE_LANDING)
# A capture that is killed at a failpoint ends itself, or ends without reaching it.
_FAILPOINT_SECONDS = 20.0
_LONGEST_SECONDS = 1.5


@dataclass
class KilledCaptures:
    """One random history of captures without merges.

    Attributes:
        database: where the transactions run.
        source: the database that is captured, which may be on a standby.
        zone: the raw zone.
        plugin: the options of the stream.
        seed: seed of the random decisions.
    """

    database: Database
    source: Database
    zone: RawZone
    plugin: PluginOptions
    seed: int
    kills: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.decide = random.Random(self.seed)
        self.slot = f"s_{self.database.name}"

    def begin(self) -> None:
        """Create tables, publication, slots and the first snapshots."""
        self.database.execute(TABLES)
        self.database.execute("create publication pub for all tables")
        name = self.database.name
        self.database.execute(f"alter database {name} set logical_decoding_work_mem = '64kB'")
        stop = threading.Event()
        thread = None
        if self.source is not self.database:
            # A slot on a standby waits for a record of the running transactions.
            thread = threading.Thread(target=self._log_snapshots, args=[stop])
            thread.start()
        try:
            create_oracle(self.source, f"{self.slot}_oracle")
            # Delta's runtime does not survive a fork: only forks use it until the count.
            child = self._fork("", lambda: copy(self._settings(), self.zone, self.slot, "pub"))
            assert _wait(child, 120) == 0
        finally:
            stop.set()
            if thread is not None:
                thread.join()

    def run(
        self, kills: int, connections: int, prepared_share: float, seconds: float = 600
    ) -> None:
        """Kill captures beside random transactions, and end with a capture of all.

        Args:
            kills: number of kills.
            connections: number of connections that write.
            prepared_share: share of the transactions that are prepared.
            seconds: time after which no further capture is killed.
        """
        end = time.monotonic() + seconds
        with Workload(self.database.conninfo, self.seed, connections, prepared_share) as workload:
            while sum(self.kills.values()) < kills and time.monotonic() < end:
                self._kill_one()
        self.outcomes = workload.outcomes
        self.database.roll_back_prepared()
        self._finish()

    def count(self) -> tuple[int, int, int]:
        """Return the numbers of changes landed, lost and doubled, compared with a second slot."""
        epoch = self.zone.epochs.latest()
        end = self.zone.changes.captured_through(1)
        assert epoch is not None
        assert end is not None
        asked = self.source, f"{self.slot}_oracle", "pub", epoch.start_lsn
        expected = _renumber(expected_changes(*asked, end))
        # A message whose record contains the last window's end belongs to the window.
        sent = expected_messages(*asked, max(end, self.zone.changes.messages_through(1)))
        everything = landed_changes(self.zone)
        found = _renumber([row for row in everything if row["xid"] != NO_TRANSACTION])
        messages = [row["new"][1] for row in everything if row["xid"] == NO_TRANSACTION]
        assert len(sent) > 0
        wanted, landed = Counter([*map(_text, expected), *sent]), Counter(map(_text, found))
        landed.update(messages)
        lost, doubled = (wanted - landed).total(), (landed - wanted).total()
        for name, rows, other in (("lost", expected, landed), ("doubled", found, wanted)):
            for row in (row for row in rows if _text(row) not in other):
                place = [row[k] for k in ("commit_lsn", "ordinal", "xid", "op", "table")]
                print(f"{name}: {place}, columns of the row: {len(row['new'] or ())}")
        print(f"messages: {len(sent)} sent, {len(messages)} landed, through {end}")
        if not lost and not doubled:
            assert messages == sent
            for rows in (found, expected):
                rows.sort(key=lambda row: (row["commit_lsn"], row["op"] == "M"))
            assert list(map(_text, found)) == list(map(_text, expected))
        return len(everything), lost, doubled

    def _settings(self) -> ConnectionSettings:
        return ConnectionSettings(conninfo=self.source.conninfo, name="test")

    def _log_snapshots(self, stop: threading.Event) -> None:
        while not stop.wait(0.2):
            self.database.value("select pg_log_standby_snapshot()")

    def _kill_one(self) -> None:
        failpoint = self.decide.choice([*FAILPOINTS, *["random"] * len(FAILPOINTS)])
        child = self._fork("" if failpoint == "random" else failpoint, self._capture)
        seconds = _FAILPOINT_SECONDS
        if failpoint == "random":
            seconds = self.decide.random() * _LONGEST_SECONDS
        status = _wait(child, seconds)
        if status is None:
            os.kill(child, signal.SIGKILL)
            status = os.waitpid(child, 0)[1]
        if os.WIFSIGNALED(status):
            self.kills[failpoint] += 1
        elif os.WEXITSTATUS(status):
            raise AssertionError("a capture failed")

    def _finish(self) -> None:
        status = _wait(self._fork("", self._capture), 300)
        assert status == 0, f"the last capture failed: {status}"

    def _fork(self, failpoint: str, act: Callable[[], None]) -> int:
        self._child_seed = self.decide.random()
        sys.stdout.flush()
        child = os.fork()
        if child:
            return child
        try:
            os.environ["PGCDC_FAILPOINT"] = failpoint
            act()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)

    def _capture(self) -> None:
        decide = random.Random(self._child_seed)
        stream = replace(LIMITS.stream, plugin=self.plugin)
        limits = replace(LIMITS, stream=stream, messages=MessagePolicy())
        deadline = time.monotonic() + 60
        while True:
            try:
                capture(self._settings(), self.zone, self.slot, "pub", decide, limits)
                return
            except TransientError:
                # The server notices the end of a killed capture's sessions after some time.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a history: numbers of changes, and what was done."""

    landed: int
    lost: int
    doubled: int
    kills: Mapping[str, int]
    transactions: Mapping[str, int]


def run_in_process(
    database: Database,
    source: Database,
    zone: RawZone,
    plugin: PluginOptions,
    seed: int,
    kills: int,
    certificates: Certificates | None = None,
) -> Outcome:
    """Run a history in a new process, because the tests' process has used Delta's runtime.

    Args:
        certificates: certificates of TLS in front of the server; None: without TLS.
    """
    names = [(each.conninfo, each.name) for each in (database, source)]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as pool:
        return pool.submit(
            _run, names[0], names[1], zone.lake.uri, plugin, seed, kills, certificates
        ).result()


class _DatabaseAt(Database):
    """A database of a server that another process has started."""

    def __init__(self, conninfo: str, name: str) -> None:
        self._conninfo = conninfo
        self.name = name

    @property
    def conninfo(self) -> str:
        return self._conninfo


def _run(
    database: tuple[str, str],
    source: tuple[str, str],
    lake: str,
    plugin: PluginOptions,
    seed: int,
    kills: int,
    certificates: Certificates | None,
) -> Outcome:
    there = _DatabaseAt(*database)
    captured = there if source == database else _DatabaseAt(*source)
    captures = KilledCaptures(there, captured, RawZone(Lake(lake), "test"), plugin, seed)
    with ExitStack() as stack:
        if certificates is not None:
            start = tls_transport.start_tls_wire
            stack.enter_context(mock.patch.object(stream_start, "SocketWire", start))
            stack.enter_context(tls_fronts(certificates))
        captures.begin()
        captures.run(kills, 3, 0.2 if plugin.two_phase else 0.0, seconds=60)
        return Outcome(*captures.count(), dict(captures.kills), dict(captures.outcomes))


def _wait(child: int, seconds: float) -> int | None:
    """Return the exit status of a child; None if it runs longer."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return status
        time.sleep(0.01)
    return None


def _renumber(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Number the changes of each transaction, and its logical messages, separately.

    The server sorts the changes of subtransactions by the start of their records, and messages by
    the end (DecodeLogicalMsgOp). A message and the next record of another subtransaction have the
    same LSN: with and without streaming, their order differs.
    """
    counts: Counter[tuple[int, bool]] = Counter()
    renumbered = []
    for row in rows:
        group = (row["commit_lsn"], row["op"] == "M")
        renumbered.append(row | {"ordinal": counts[group]})
        counts[group] += 1
    return renumbered


def _text(row: dict[str, Any]) -> str:
    # The two sides have equal times with different objects of the time zone.
    return repr(sorted((row | {"commit_ts": row["commit_ts"].timestamp()}).items()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=7200)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--pg", type=int, default=18)
    parser.add_argument("--streaming", default="on")
    parser.add_argument("--two-phase", action="store_true")
    parser.add_argument("--encoding", default="UTF8", help="encoding of the database")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = new_server_folder("kills")
        server = EmbeddedServer(folder / "data", options.pg, SETTINGS)
        stack.callback(folder.rmdir)
        stack.callback(server.remove)
        server.start()
        made = encoded_database(Database(server, "postgres"), options.encoding)
        database = stack.enter_context(made)
        lake = stack.enter_context(tempfile.TemporaryDirectory())
        plugin = PluginOptions(Streaming(options.streaming), options.two_phase)
        zone = RawZone(Lake(lake), "test")
        captures = KilledCaptures(database, database, zone, plugin, options.seed)
        began = time.monotonic()
        captures.begin()
        captures.run(options.kills, 4, 0.2 if options.two_phase else 0.0, options.seconds)
        seconds = time.monotonic() - began
        landed, lost, doubled = captures.count()
        print(
            f"seed {options.seed}, Postgres {options.pg}, {options.encoding}, {plugin}: "
            f"{captures.kills.total()} kills "
            f"in {seconds:.0f} s; {landed} changes landed, {lost} lost, {doubled} doubled; "
            f"transactions: {dict(captures.outcomes)}; kills: {dict(captures.kills)}"
        )


if __name__ == "__main__":
    main()
