"""Streams with options of pgoutput, and the landing of their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pgcdc_assets.postgres.stream.connection import ReplicationStream
from pgcdc_assets.postgres.stream.plugin_options import PluginOptions
from pgcdc_assets.protocol.frames import MessageBatch
from pgcdc_assets.protocol.heads import ACTION_AT

if TYPE_CHECKING:
    import pyarrow as pa

    from pgcdc_assets.protocol.streaming_decoder import StreamingDecoder


class OptionStream(ReplicationStream):
    """A replication stream with options of pgoutput."""

    def __init__(self, *arguments: Any, options: PluginOptions, version: int, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._options, self._version = options, version

    def _command(self) -> str:
        clause = self._options.clause(self._publication, self._version)
        return f'START_REPLICATION SLOT "{self._slot}" LOGICAL {self._flush_lsn} {clause}'


def read_window(
    stream: ReplicationStream,
    decoder: StreamingDecoder,
    watch: Callable[[bytes], None] = lambda message: None,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the decoder's window from a started stream.

    Call `watch` with each message of the plugin.
    """
    for batch in stream.batches():
        for message in payloads(batch):
            watch(message[ACTION_AT:])
        yield from decoder.decode(batch)
        if decoder.is_finished:
            return


def payloads(batch: MessageBatch) -> Iterator[bytes]:
    """Yield the payloads of a batch."""
    for start, end in zip(batch.starts.tolist(), batch.ends.tolist(), strict=True):
        yield batch.buffer[start:end].tobytes()
