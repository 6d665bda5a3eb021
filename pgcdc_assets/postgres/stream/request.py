"""What a stream is asked for: slot, publication, start, time limits and sizes; and its errors."""

from __future__ import annotations

from dataclasses import dataclass, field

from pgcdc_assets.errors import ConnectionLost, PgcdcError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.postgres.encodings import UNCONVERTIBLE, TextNotConvertible
from pgcdc_assets.postgres.stream.errors import stream_failure
from pgcdc_assets.postgres.stream.plugin_options import PluginOptions
from pgcdc_assets.postgres.stream.transport import ServerError, WireSettings


@dataclass(frozen=True)
class StreamSettings:
    """The stream's time limits and sizes.

    Attributes:
        status_seconds: longest interval between two status packets; the interval is shorter if the
            server's wal_sender_timeout is short.
        silence_seconds: time without bytes, despite requests for a reply, after which the
            connection counts as lost.
        watch_seconds: interval between two calls of the caller's `watch`.
        queued_batches: size of the queue in batches; the thread stops reading at a full queue.
        end_seconds: time limit of the stream's end.
        wire: the settings of the transport.
        plugin: the options of pgoutput.
        as_stored: receive texts in the encoding of the database.
    """

    status_seconds: float = 10.0
    silence_seconds: float = 60.0
    watch_seconds: float = 1.0
    queued_batches: int = 2
    end_seconds: float = 10.0
    wire: WireSettings = field(default_factory=WireSettings)
    plugin: PluginOptions = field(default_factory=PluginOptions)
    as_stored: bool = False


@dataclass(frozen=True)
class StreamRequest:
    """The stream of one slot and publication from an LSN on.

    Attributes:
        connection: the source database.
        slot: the slot's name.
        publication: the publication's name.
        start_lsn: end of the durable data in the raw zone; the stream resumes there.
        settings: time limits and sizes.
    """

    connection: ConnectionSettings
    slot: str
    publication: str
    start_lsn: Lsn
    settings: StreamSettings

    def command(self, server_version: int) -> str:
        """Return START_REPLICATION for a server's version."""
        options = self.settings.plugin.clause(self.publication, server_version)
        return f'START_REPLICATION SLOT "{self.slot}" LOGICAL {self.start_lsn} {options}'

    def lost(self, doing: str, reason: object) -> ConnectionLost:
        """Return the error of a lost connection."""
        server = self.connection.describe()
        return ConnectionLost(server=server, doing=doing, reason=str(reason).rstrip("."))

    def refused(self, error: ServerError) -> PgcdcError:
        """Return the error of a server that ended or refused the stream."""
        if error.sqlstate in UNCONVERTIBLE and not self.settings.as_stored:
            return TextNotConvertible(slot=self.slot)
        connection = self.connection
        return stream_failure(
            connection.describe(), self.slot, self.publication, error, connection.renewal
        )
