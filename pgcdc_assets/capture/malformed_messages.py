"""Batches that cannot be decoded, kept as files for a report about the problem.

A file holds the rows of the batch, so nothing is written without the setting
`stream.malformed_folder`. A file has the messages of a batch, each after its length as eight bytes
in network byte order. The file is readable by its owner only.
"""

from __future__ import annotations

import os
import struct
from dataclasses import replace
from pathlib import Path

from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.protocol.frames import MessageBatch


def keep_malformed(
    error: ProtocolError, batch: MessageBatch, window: LsnWindow, slot: str, folder: str | None
) -> ProtocolError:
    """Return the error with window and place of its batch, and write the batch to a folder.

    Args:
        error: the error of the batch.
        batch: the batch.
        window: the window in progress.
        slot: the slot's name.
        folder: the folder; None: nothing is written.
    """
    start = "" if error.start is None else f", {error.start} bytes into its batch"
    reason = f"{error.reason} (window {window.key}{start})"
    return replace(error, reason=reason + _keep(batch, window, slot, folder))


def _keep(batch: MessageBatch, window: LsnWindow, slot: str, folder: str | None) -> str:
    if folder is None:
        return ". To keep the bytes of the batch for a report, set stream.malformed_folder"
    path = Path(folder) / f"{slot}-{window.key}.messages"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(number, "wb") as file:
            for start, end in zip(batch.starts.tolist(), batch.ends.tolist(), strict=True):
                message = batch.buffer[start:end].tobytes()
                file.write(struct.pack("!Q", len(message)))
                file.write(message)
    except OSError as failure:
        return f". The batch was not written to {folder}: {failure.strerror}"
    return f". {path} has the bytes of the batch, with values of rows"
