"""A compared tool, and the measurement of its reading of the stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.processes import Usage
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.connection import ConnectionSettings

WAL2JSON_SLOT = "source_wal2json"
# Time limit. A tool that has not read all changes is stopped, and its rate so far is recorded.
LIMIT_SECONDS = 120


@dataclass(frozen=True)
class Stream:
    """The changes for a tool to read: a slot from before the workload.

    Attributes:
        folder: an empty folder for the output of the tool.
    """

    conninfo: str
    slot: str
    publication: str
    end: Lsn
    changes: int
    folder: Path

    @property
    def parameters(self) -> Mapping[str, str]:
        """Return host, port, dbname and user of the connection."""
        return ConnectionSettings(conninfo=self.conninfo, name="peer").parameters()

    @property
    def url(self) -> str:
        """The connection as a URL without its scheme and password."""
        parts = self.parameters
        return f"{parts['user']}:unused@{parts['host']}:{parts['port']}/{parts['dbname']}"


@dataclass(frozen=True)
class Reading:
    """The measurement of one run of a tool.

    Attributes:
        changes: number of row changes that the tool wrote.
        seconds: time from fork until the last change was written.
    """

    changes: int
    seconds: float
    usage: Usage

    @property
    def rate(self) -> float:
        """Changes per second."""
        return self.changes / self.seconds

    @property
    def cpu_seconds_per_million(self) -> float:
        """CPU of the tool's processes, without the CPU of the server."""
        return self.usage.cpu_seconds * 1e6 / self.changes


class Peer(Protocol):
    """A tool that reads Postgres's changes.

    Attributes:
        name: the tool's name in the names of its results.
        version: the pinned version.
        plugin: the output plugin of its slots, `pgoutput` or `wal2json`.
        slot_source: the slot from which its slots are copied.
        writes: the most durable output of the tool in this benchmark.
        row: the conversion of a row by the tool.
    """

    name: str
    version: str
    plugin: str
    slot_source: str
    writes: str
    row: str

    def prepare(self) -> None:
        """Create the environment.

        Raises:
            UnavailableError: the tool is not available on this machine.
        """

    def prepare_source(self, stream: Stream) -> None:
        """Prepare the empty tables for the tool, before the first change.

        Args:
            stream: the stream with the slot `slot_source`, which the tool creates if it is missing.

        Raises:
            CommandFailedError: the tool failed.
        """

    def slot_name(self, number: int) -> str:
        """Return the required name of the tool's slot."""

    def read(self, stream: Stream) -> Reading:
        """Read the stream once.

        Raises:
            CommandFailedError: the tool failed.
        """


def count_lines(path: Path, text: bytes) -> int:
    """Count the lines of a file that contain a text."""
    with path.open("rb") as lines:
        return sum(text in line for line in lines)
