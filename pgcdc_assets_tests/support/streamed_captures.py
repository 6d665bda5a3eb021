"""The rows and messages of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pgcdc_assets.protocol.frames import MessageBatch
from pgcdc_assets.protocol.heads import ACTION_AT

if TYPE_CHECKING:
    import pyarrow as pa

    from pgcdc_assets.postgres.stream.connection import ReplicationStream
    from pgcdc_assets.protocol.streaming_decoder import StreamingDecoder


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
