"""What a compared tool is, and what one reading of the stream by it took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.processes import Usage
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.connection import ConnectionSettings

WAL2JSON_SLOT = "source_wal2json"
# A tool that has not read all by then is stopped, and has the rate that it has reached.
LIMIT_SECONDS = 120


@dataclass(frozen=True)
class Stream:
    """The changes that a tool is to read: a slot of its own before a workload.

    Attributes:
        folder: an empty folder for what the tool writes.
    """

    conninfo: str
    slot: str
    publication: str
    end: Lsn
    changes: int
    folder: Path

    @property
    def parameters(self) -> Mapping[str, str]:
        """Host, port, dbname and user of the connection."""
        return ConnectionSettings(conninfo=self.conninfo, name="peer").parameters()

    @property
    def url(self) -> str:
        """The connection as a URL without its scheme. The server asks for no password."""
        parts = self.parameters
        return f"{parts['user']}:unused@{parts['host']}:{parts['port']}/{parts['dbname']}"


@dataclass(frozen=True)
class Reading:
    """What one run of a tool took.

    Attributes:
        changes: how many row changes it wrote.
        seconds: from fork until it had written them.
    """

    changes: int
    seconds: float
    usage: Usage

    @property
    def rate(self) -> float:
        """Changes a second."""
        return self.changes / self.seconds

    @property
    def cpu_seconds_per_million(self) -> float:
        """CPU of the tool's processes; that of the server is not in it."""
        return self.usage.cpu_seconds * 1e6 / self.changes


class Peer(Protocol):
    """A tool that reads Postgres's changes.

    Attributes:
        name: as in the names of its results.
        version: what is pinned.
        plugin: the output plugin that it reads, `pgoutput` or `wal2json`.
        slot_source: the slot that each of its slots is a copy of.
        writes: the most durable thing that it writes here.
        row: what it does with a row.
    """

    name: str
    version: str
    plugin: str
    slot_source: str
    writes: str
    row: str

    def prepare(self) -> None:
        """Make the environment.

        Raises:
            UnavailableError: the tool is not to be had here.
        """

    def prepare_source(self, stream: Stream) -> None:
        """See the empty tables, before there is a change, if the tool has to.

        Args:
            stream: with the slot `slot_source`, which the tool makes if it is not there.

        Raises:
            CommandFailedError: the tool failed.
        """

    def slot_name(self, number: int) -> str:
        """Return the name that its slot has to have."""

    def read(self, stream: Stream) -> Reading:
        """Read the stream once.

        Raises:
            CommandFailedError: the tool failed.
        """


def count_lines(path: Path, text: bytes) -> int:
    """Count the lines of a file that contain a text."""
    with path.open("rb") as lines:
        return sum(text in line for line in lines)
