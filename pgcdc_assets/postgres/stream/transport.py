"""The bytes of a replication connection after START_REPLICATION, both ways.

libpq connects and authenticates; then there are two ways to read. `SocketWire` takes the socket
from libpq and reads into its own buffers, which are cut into messages a buffer at a time: no object
and no call per message. `LibpqWire` asks libpq for each message and is for connections that libpq
encrypts. Measurements: docs/decisions/0001-stream-over-psycopg-3.md.

How a walsender works decides the speed. It writes each message to its socket at once. While the
reader's end has room, each of these writes travels the whole way through the kernel and wakes the
reader for 200 bytes: more CPU than decoding the WAL takes, on the server's one busy core. While the
reader's end is full, messages are appended to what waits already, at half the cost. So we do not
read what there is as soon as it is there: after the first bytes we pause, then take all that has
gathered, until a pause brings little. A Unix socket holds too few messages for that; there one call
reads until the batch is full or the pause is over (MSG_WAITALL), without a return to Python in
between, where it would wait for the interpreter's lock while the decoder holds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pgcdc_assets.protocol.frames import MessageBatch

_NOT_IN_PREREQUISITE_STATE = "55000"
_UNDEFINED_OBJECT = "42704"

# A read hands over, or gives up for now, after so long: between two reads status packets go out,
# and a message larger than a batch may come for minutes. A full batch rarely takes as long.
READ_SECONDS = 0.5


@dataclass(frozen=True)
class WireSettings:
    """How bytes are read.

    Attributes:
        batch_bytes: a batch is handed over when it has so many bytes.
        quiet_seconds: how long a read waits for the first byte.
        pause_seconds: after the first byte, how long the kernel collects before we read again; over
            a Unix socket, how long one read waits in all.
        busy_bytes: less than this in a pause, and what is there is handed over.
        send_seconds: a packet that cannot be sent in this time is an error.
        start_seconds: the server has so long to answer START_REPLICATION.
    """

    batch_bytes: int = 8 * 1024 * 1024
    quiet_seconds: float = 0.1
    pause_seconds: float = 0.02
    busy_bytes: int = 32 * 1024
    send_seconds: float = 10.0
    start_seconds: float = 60.0


class ServerError(Exception):
    """What the server answered instead of going on."""

    def __init__(self, sqlstate: str, message: str) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate
        self.message = message


class StreamEnded(Exception):
    """The server ended the stream in order."""


class Wire(Protocol):
    """A started stream. `send` may be called by several threads, `read` by one.

    Attributes:
        heard_at: when bytes last came, by the monotonic clock; a long message comes in many reads.
    """

    bytes_received: int
    heard_at: float

    def read(self) -> MessageBatch | None:
        """Wait for messages: a full batch, or what came until the stream fell quiet.

        Raises:
            ServerError: the server sent an error.
            StreamEnded: the server ended the stream.
            OSError: the connection broke.
        """

    def send(self, payload: bytes) -> None:
        """Send one CopyData message.

        Raises:
            OSError: the connection broke.
        """

    def send_end(self) -> None:
        """Send CopyDone: the server answers with its own and reads nothing more of us."""

    def close(self) -> None:
        """Close the connection, whatever state it is in."""


def check_notice(fields: dict[bytes, str]) -> None:
    """Refuse the one warning that means lost changes.

    Since Postgres 18 pgoutput goes on without a publication that does not exist at this point of
    the WAL, and only warns; before it was an error. Changes of its tables would be missing, with
    success in the log.

    Args:
        fields: of the notice, by their letters.
    """
    if fields.get(b"V") == "WARNING" and fields.get(b"C") == _NOT_IN_PREREQUISITE_STATE:
        raise ServerError(_UNDEFINED_OBJECT, fields.get(b"M", "the publication does not exist"))
