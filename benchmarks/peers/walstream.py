"""pg_walstream, a crate that decodes pgoutput, with a program that writes its events as JSON."""

from __future__ import annotations

from pathlib import Path

from benchmarks.peers.environments import build_crate
from benchmarks.peers.peer import Reading, Stream
from benchmarks.processes import run_measured
from benchmarks.source import SLOT


class PgWalstream:
    """The crate with a program of 60 lines, in `pg_walstream/` beside this file."""

    name = "pg_walstream"
    version = "pg_walstream 0.9.0"
    plugin = "pgoutput"
    slot_source = SLOT
    writes = "JSON lines in a file, synced at the end, by a program of ours around the library"
    row = "an event with Postgres's texts by the names of the columns; no types"
    _program: Path

    def prepare(self) -> None:
        """Build the program by cargo."""
        self._program = build_crate(self.name, Path(__file__).with_name(self.name))

    def slot_name(self, number: int) -> str:
        """Return the name of a slot."""
        return f"peer_{self.name}_{number}"

    def prepare_source(self, stream: Stream) -> None:
        """Do nothing: the crate needs no preparation of the source."""

    def read(self, stream: Stream) -> Reading:
        """Read up to the LSN at the end of the workload."""
        url = f"postgresql://{stream.url}?replication=database&sslmode=disable"
        usage = run_measured(
            [
                *(str(self._program), url, stream.slot, stream.publication),
                *(str(int(stream.end)), str(stream.folder / "changes.jsonl")),
            ]
        )
        return Reading(int(usage.output), usage.seconds, usage)
