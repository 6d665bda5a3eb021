"""The transport of a replication connection after START_REPLICATION.

libpq connects and authenticates. Three implementations then read the stream. `SocketWire`
duplicates libpq's socket and reads into its own buffers, without an object or a call per message.
`TlsWire` does the same over a second connection, which the package encrypts itself. `LibpqWire`
reads each message through libpq: for GSSAPI encryption, and for TLS with options that only libpq
has. Measurements: docs/decisions/0001-stream-over-psycopg-3.md and
docs/decisions/0057-tls-on-large-reads.md.

The walsender determines the speed. A walsender writes each message to its socket at once. If the
reader waits in a read, each write of about 200 bytes wakes the reader, which costs the server's
core more CPU than the decoding of the WAL. If the reader does not wait, the kernel appends the
message to its buffer, at half the cost. A reader therefore pauses after the first bytes, then reads
all received bytes, and repeats until a pause brings few bytes. The buffer of a Unix socket is too
small for a pause: one call with MSG_WAITALL reads until the batch is full or the pause is over,
without returning to Python. A return to Python would wait for the global interpreter lock while the
decoder runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from pgcdc_assets.protocol.frames import MessageBatch

_NOT_IN_PREREQUISITE_STATE = "55000"
_UNDEFINED_OBJECT = "42704"
# The function of slot.c that checks `synchronized_standby_slots`. Messages are translated.
_STANDBY_CHECK = "StandbySlotsHaveCaughtup"

# A read returns after this time at the latest, because status packets are sent between two reads,
# and the bytes of one large message may arrive for minutes. A full batch rarely takes as long.
READ_SECONDS = 0.5


@dataclass(frozen=True)
class WireSettings:
    """Sizes and time limits of a transport.

    Attributes:
        batch_bytes: size of a full batch in bytes.
        quiet_seconds: time that a read waits for the first byte.
        pause_seconds: pause between two reads of the socket; over a Unix socket, the time limit of
            one MSG_WAITALL read.
        busy_bytes: a read returns after a pause with fewer received bytes than this.
        send_seconds: time limit for sending a packet.
        start_seconds: time limit for the server's reply to START_REPLICATION.
    """

    batch_bytes: int = 8 * 1024 * 1024
    quiet_seconds: float = 0.1
    pause_seconds: float = 0.02
    busy_bytes: int = 32 * 1024
    send_seconds: float = 10.0
    start_seconds: float = 60.0


class ServerError(Exception):
    """An ErrorResponse of the server.

    Attributes:
        sqlstate: the error's SQLSTATE.
        message: the primary message.
        context: where the error occurred, such as the callback of an output plugin.
        function: the function in the server's source, which is not translated.
        has_detail: the error has a detail message.
        has_hint: the error has a hint.
    """

    def __init__(
        self,
        sqlstate: str,
        message: str,
        context: str = "",
        *,
        function: str = "",
        has_detail: bool = False,
        has_hint: bool = False,
    ) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate
        self.message = message
        self.context = context
        self.function = function
        self.has_detail = has_detail
        self.has_hint = has_hint

    @classmethod
    def of(cls, fields: Mapping[bytes, str]) -> ServerError:
        """Return the error of an ErrorResponse with these fields, by letter."""
        return cls(
            fields.get(b"C", ""),
            fields.get(b"M") or "no reason given",
            fields.get(b"W", ""),
            function=fields.get(b"R", ""),
            has_detail=bool(fields.get(b"D")),
            has_hint=bool(fields.get(b"H")),
        )


class StreamEnded(Exception):
    """The server ended the stream by CopyDone."""


class LibpqRequired(Exception):
    """A connection needs something that only libpq provides. The message says what."""


class Wire(Protocol):
    """A started stream. Several threads may call `send`; one thread calls `read`.

    Attributes:
        bytes_received: number of bytes received.
        heard_at: time of the last received bytes by the monotonic clock.
        backend_pid: pid of the walsender.
        standby_notice: the server's last sentence about a standby that the stream waits for.
    """

    bytes_received: int
    heard_at: float
    backend_pid: int
    standby_notice: str

    def read(self) -> MessageBatch | None:
        """Return the next messages, a full batch or fewer; None if no message is complete.

        Raises:
            ServerError: the server sent an error.
            StreamEnded: the server ended the stream.
            OSError: the connection was lost.
        """

    def send(self, payload: bytes) -> None:
        """Send one CopyData message.

        Raises:
            OSError: the connection was lost.
        """

    def send_end(self) -> None:
        """Send CopyDone. The server replies with CopyDone, and reads no further messages."""

    def close(self) -> None:
        """Close the connection in any state."""


def check_notice(fields: dict[bytes, str]) -> str:
    """Raise an error for the warning about a missing publication.

    If the publication does not exist at the current WAL position, Postgres 18 and newer warn and
    skip the changes (src/backend/replication/pgoutput/pgoutput.c, LoadPublications). Older versions
    report an error. Without this check the capture would succeed and miss changes.

    The stream of a slot with `failover` waits for the standbys of `synchronized_standby_slots`. The
    server warns with the same SQLSTATE while one of them is not connected.

    Args:
        fields: the notice's fields by letter.

    Returns:
        The server's sentence about a standby; empty for any other notice.

    Raises:
        ServerError: the notice is the warning about a publication.
    """
    message = fields.get(b"M", "the publication does not exist")
    if fields.get(b"R") == _STANDBY_CHECK:
        return message
    if fields.get(b"V") == "WARNING" and fields.get(b"C") == _NOT_IN_PREREQUISITE_STATE:
        raise ServerError(_UNDEFINED_OBJECT, message, fields.get(b"W", ""))
    return ""
