"""Batches without a change: what a stream brings while only other tables or databases change.

Between two transactions, such a batch has keepalives, empty transactions (which servers before
version 15 send for tables outside the publication), and heartbeats of this package.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol.frames import MessageBatch
from pgcdc_assets.protocol.heads import BEGIN, BODY_AT, COMMIT, MESSAGE, read_actions

# The prefix of the package's logical messages, as on the wire: a text that ends with a zero byte.
HEARTBEAT_PREFIX = "pgcdc"
_PREFIX = HEARTBEAT_PREFIX.encode() + b"\0"

# Logical message: flags int8, LSN int64, then the prefix (53.9 Logical Replication Message
# Formats).
_PREFIX_AT = BODY_AT + 1 + 8


def is_empty(batch: MessageBatch) -> bool:
    """Return whether the messages have no row, so that a capture need not keep the messages.

    The batch begins between two transactions. A batch that ends inside a transaction, and a batch
    with a malformed message, are not empty: the decoder reads them.
    """
    actions = _find_actions(batch)
    return actions is not None and _alternate(actions[actions != 0])


def is_quiet(batch: MessageBatch) -> bool:
    """Return whether the messages have no row besides heartbeats. See `is_empty`."""
    actions = _find_actions(batch)
    if actions is None:
        return False
    for start in batch.starts[actions == MESSAGE].tolist():
        first = start + _PREFIX_AT
        if batch.buffer[first : first + len(_PREFIX)].tobytes() != _PREFIX:
            return False
    return _alternate(actions[(actions != 0) & (actions != MESSAGE)])


def _find_actions(batch: MessageBatch) -> npt.NDArray[np.uint8] | None:
    try:
        return read_actions(batch)
    except ProtocolError:
        return None


def _alternate(actions: npt.NDArray[np.uint8]) -> bool:
    """Return whether each Begin is followed by its Commit, and nothing else is among them."""
    is_whole = len(actions) % 2 == 0
    return bool(is_whole and (actions[::2] == BEGIN).all() and (actions[1::2] == COMMIT).all())
