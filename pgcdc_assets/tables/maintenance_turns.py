"""The maintenance of tables that are merged together, spread over their merges.

A hundred tables that are merged together have nearly the same versions. If all were maintained at
every tenth version, every tenth merge would take some seconds longer. So the path of a table
determines its turn.
"""

from __future__ import annotations

import zlib


def has_turn(path: str, version: int, interval: int) -> bool:
    """Return whether it is a table's turn at a version: one of `interval` versions."""
    return (version + zlib.crc32(path.encode())) % interval == 0
