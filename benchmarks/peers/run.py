"""Other tools and a capture read the same stream, in turns.

Each tool has its own environment with pinned versions. A tool that is not available or fails has an
entry with the reason. All tools read slots of one Postgres 15 of Debian, for which wal2json is
available, over loopback TCP. Processes are timed from fork. A tool that waits for further changes
at the end is timed until its last change is written.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import psycopg2.extensions

from benchmarks import workload
from benchmarks.peers.debezium import Debezium, DebeziumIceberg
from benchmarks.peers.environments import UnavailableError, find_wal2json, shorten
from benchmarks.peers.ingestr import Ingestr
from benchmarks.peers.peer import WAL2JSON_SLOT, Peer, Reading, Stream
from benchmarks.peers.singer import MeltanoTap, PipelinewiseTap
from benchmarks.peers.walstream import PgWalstream
from benchmarks.processes import CommandFailedError
from benchmarks.results import Result
from benchmarks.source import Source, log, source
from benchmarks.turns import in_turns
from pgcdc_assets.demo.programs import find_binaries, run_program
from pgcdc_assets.lsn import Lsn

VERSION = 15
REPETITIONS = 3
OURS = "capture"
# Minor versions from 15.19 use only the output plugins of this list.
_ALLOWED_PLUGINS = "output_plugin_libraries"


def build_peers() -> list[Peer]:
    """Return the tools in the order of the table."""
    return [
        PgWalstream(),
        Debezium(),
        DebeziumIceberg(),
        MeltanoTap(),
        PipelinewiseTap(),
        Ingestr(),
    ]


def run() -> Iterator[Result]:
    """Measure captures and the available tools."""
    peers = build_peers()
    with _wal2json_settings() as (settings, missing):
        reasons = {peer.name: _prepare(peer, missing) for peer in peers}

        def work(conn: psycopg2.extensions.connection) -> int:
            if missing is None:
                with conn.cursor() as cursor:
                    create = "select pg_create_logical_replication_slot(%s, 'wal2json')"
                    cursor.execute(create, (WAL2JSON_SLOT,))
            for peer in peers:
                if reasons[peer.name] is None:
                    reasons[peer.name] = _prepare_source(peer, conn.dsn)
            return workload.run(conn)

        with source(work, version=VERSION, settings=settings) as server:
            readings = _read_in_turns(server, peers, reasons)
    for peer in peers:
        yield from _results(peer, readings, reasons[peer.name])


def _prepare(peer: Peer, missing: str | None) -> str | None:
    """Create a tool's environment; return the reason if the tool is not available."""
    if peer.plugin == "wal2json" and missing is not None:
        return missing
    try:
        peer.prepare()
    except UnavailableError as error:
        log(f"{peer.name}: {error}")
        return str(error)
    return None


def _prepare_source(peer: Peer, conninfo: str) -> str | None:
    """Prepare the empty tables for a tool; return the reason if the tool fails."""
    with TemporaryDirectory() as folder:
        slot, publication = peer.slot_source, workload.PUBLICATION
        stream = Stream(conninfo, slot, publication, Lsn(0), 0, Path(folder))
        try:
            peer.prepare_source(stream)
        except CommandFailedError as error:
            log(f"{peer.name}: {error}")
            return shorten(str(error))
    return None


@contextmanager
def _wal2json_settings() -> Iterator[tuple[Mapping[str, str], str | None]]:
    """Yield the server's settings for wal2json, and the reason if wal2json is not available."""
    with TemporaryDirectory(prefix="pgcdc-bench-wal2json-") as folder:
        try:
            library = find_wal2json(VERSION)
        except UnavailableError as error:
            yield {}, f"wal2json: {error}"
            return
        settings: dict[str, str] = {}
        if _knows(_ALLOWED_PLUGINS):
            settings[_ALLOWED_PLUGINS] = "pgoutput, wal2json"
        if library is not None:
            # The server runs as another user, who may have no access to our folder.
            Path(folder).chmod(0o755)
            shutil.copy(library, folder)
            settings["dynamic_library_path"] = f"{folder}:$libdir"
        yield settings, None


def _knows(setting: str) -> bool:
    """Return whether the server has a setting; it does not start with one that it does not know."""
    _, described = run_program(find_binaries(VERSION) / "postgres", "--describe-config")
    return any(line.startswith(f"{setting}\t") for line in described.splitlines())


def _read_in_turns(
    server: Source, peers: list[Peer], reasons: dict[str, str | None]
) -> dict[str, list[Reading]]:
    """Read the stream by all available tools; a tool that fails is skipped from then on."""
    readings: defaultdict[str, list[Reading]] = defaultdict(list)
    for number in range(REPETITIONS):
        sides = {OURS: partial(_read_ours, server)}
        for peer in peers:
            if reasons[peer.name] is None:
                sides[peer.name] = partial(_read_peer, server, peer, number, reasons)
        for name, reading in in_turns(sides, number).items():
            if reading is not None:
                readings[name].append(reading)
    return readings


def _read_ours(server: Source) -> Reading | None:
    usage = server.capture()
    reading = Reading(server.changes, usage.seconds, usage)
    _log_reading(OURS, reading)
    return reading


def _read_peer(
    server: Source, peer: Peer, number: int, reasons: dict[str, str | None]
) -> Reading | None:
    """Read the stream once; return None and record a reason if the tool fails or writes nothing."""
    with (
        server.slot(peer.slot_name(number), peer.slot_source) as slot,
        TemporaryDirectory(dir=server.folder) as folder,
    ):
        stream = Stream(
            conninfo=server.conninfo(),
            slot=slot,
            publication=workload.PUBLICATION,
            end=server.end,
            changes=server.changes,
            folder=Path(folder),
        )
        try:
            reading = peer.read(stream)
        except (CommandFailedError, ValueError) as error:
            reasons[peer.name] = shorten(str(error))
            log(f"{peer.name}: {error}")
            return None
    if reading.changes == 0:
        reasons[peer.name] = "the tool wrote no change"
        return None
    _log_reading(peer.name, reading)
    return reading


def _log_reading(name: str, reading: Reading) -> None:
    log(
        f"{name}: {reading.changes:,} changes in {reading.seconds:.1f} s, {reading.rate:,.0f}/s, "
        f"CPU {reading.cpu_seconds_per_million:.1f} s per million, {reading.usage.peak_mb:.0f} MB"
    )


def _results(
    peer: Peer, readings: dict[str, list[Reading]], reason: str | None
) -> Iterator[Result]:
    """Yield a tool's results with ours of the same rounds, or ours with the tool's reason."""
    name = f"peers_{peer.name}"
    settings = {
        "version": peer.version,
        "plugin": peer.plugin,
        "writes": peer.writes,
        "row": peer.row,
    }
    ours, theirs = readings[OURS], readings.get(peer.name, [])
    rates = [reading.rate for reading in ours]
    if reason is not None or not theirs:
        alone = Result.reported(name, rates, "changes/s")
        yield replace(alone, settings={**settings, "unavailable": reason or "not run"})
        return
    written = min(reading.changes for reading in theirs)
    settings["changes_written"] = f"{written}"
    measured = (
        Result.of(name, rates, [reading.rate for reading in theirs], "changes/s"),
        Result.of(
            f"{name}_cpu",
            [reading.cpu_seconds_per_million for reading in ours],
            [reading.cpu_seconds_per_million for reading in theirs],
            "s per million changes",
        ),
        Result.of(
            f"{name}_peak_memory",
            [reading.usage.peak_mb for reading in ours],
            [reading.usage.peak_mb for reading in theirs],
            "MB",
        ),
    )
    for result in measured:
        yield replace(result, settings=settings)
