"""The options of pgoutput in START_REPLICATION, by the version of the server.

Protocol versions (src/include/replication/logicalproto.h): 1 since Postgres 10, 2 (streaming) since
14, 3 (two-phase commit) since 15, 4 (`streaming 'parallel'`) since 16. The version is the lowest
one that has the options. The server refuses an option that needs a higher version (pgoutput.c,
pgoutput_startup).

With `parallel`, the server sends the same blocks as with `on`. Only Stream Abort has LSN and time
in addition.

With `two_phase`, the server marks the slot, which keeps `two_phase` from then on: the server sends
prepared transactions at their PREPARE to each later stream (logical.c, CreateDecodingContext).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pgcdc_assets.errors import ConfigurationError


class Streaming(enum.StrEnum):
    """When the server sends the changes of a transaction."""

    OFF = "off"
    ON = "on"
    PARALLEL = "parallel"


class Origin(enum.StrEnum):
    """Which changes the server sends, by their replication origin."""

    ANY = "any"
    NONE = "none"


ORIGIN_VERSION = 16

# The protocol version of each mode, and the first server version that has it.
STREAMING_VERSIONS = {Streaming.OFF: (1, 10), Streaming.ON: (2, 14), Streaming.PARALLEL: (4, 16)}


@dataclass(frozen=True)
class PluginOptions:
    """The options of pgoutput.

    Attributes:
        streaming: `off`, at the commit; `on` and `parallel`, before the commit if the transaction
            exceeds `logical_decoding_work_mem`.
        two_phase: a prepared transaction is sent at PREPARE TRANSACTION.
        origin: `none`: only changes without a replication origin (Postgres 16).
    """

    streaming: Streaming = Streaming.OFF
    two_phase: bool = False
    origin: Origin = Origin.ANY

    def clause(self, publication: str, server_version: int) -> str:
        """Return the option list of START_REPLICATION, with parentheses.

        Args:
            publication: name of the publication.
            server_version: version of the server as of `server_version_num`, such as 160004.

        Raises:
            ConfigurationError: the server is too old for the options.
        """
        version, first = STREAMING_VERSIONS[self.streaming]
        if server_version // 10000 < first:
            raise ConfigurationError(
                reason=f"`stream.streaming: {self.streaming}` requires Postgres {first}, and the "
                f"server has version {server_version // 10000}. Set it to "
                f"{'on or off' if server_version >= 140000 else 'off'}."
            )
        if self.two_phase:
            if server_version < 150000:
                raise ConfigurationError(
                    reason="`stream.two_phase: true` requires Postgres 15, and the server has "
                    f"version {server_version // 10000}. Set it to false."
                )
            version = max(version, 3)
        if self.origin is Origin.NONE and server_version // 10000 < ORIGIN_VERSION:
            raise ConfigurationError(
                reason=f"`stream.origin: none` requires Postgres {ORIGIN_VERSION}, and the server "
                f"has version {server_version // 10000}. Set it to any."
            )
        name = publication.replace('"', '""').replace("'", "''")
        options = "" if self.streaming is Streaming.OFF else f", streaming '{self.streaming}'"
        options += ", two_phase 'on'" if self.two_phase else ""
        options += "" if self.origin is Origin.ANY else f", origin '{self.origin}'"
        return (
            f"(proto_version '{version}', publication_names '\"{name}\"', messages 'true'{options})"
        )
