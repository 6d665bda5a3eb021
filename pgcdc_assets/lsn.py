"""WAL positions and windows of WAL.

`Lsn` is the only parser and printer of `"0/16B3748"`. `LsnWindow` is the only parser and printer of
window keys, so Dagster partition keys, raw-zone values and log lines agree.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Self

_LSN_TEXT = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})")
_WINDOW_KEY = re.compile(r"([0-9]{4})-([0-9A-F]{16})-([0-9A-F]{16})")

_MAX_LSN = 2**63 - 1


class Lsn(int):
    """A position in the write-ahead log: a byte offset, printed as Postgres's type pg_lsn.

    An LSN is below 2**63, because Delta and Spark have no unsigned 64-bit integers. A cluster that
    writes 1 GB of WAL per second reaches this limit after three centuries.

    Raises:
        ValueError: the value is negative or does not fit 63 bits.
    """

    __slots__ = ()

    def __new__(cls, value: int = 0) -> Self:
        if not 0 <= value <= _MAX_LSN:
            raise ValueError(f"not an LSN: {value} is outside 0 to 2^63-1")
        return super().__new__(cls, value)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the LSN of a text such as `16/B374D848` (8.20 pg_lsn Type).

        Raises:
            ValueError: the text has another form.
        """
        match = _LSN_TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"not an LSN: {text!r} does not have the form 16/B374D848")
        return cls(int(match[1], 16) << 32 | int(match[2], 16))

    def __str__(self) -> str:
        return f"{self >> 32:X}/{self & 0xFFFFFFFF:X}"

    def __repr__(self) -> str:
        return f"Lsn({self})"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


class Position(NamedTuple):
    """A point of the stream over all epochs; positions compare in stream order."""

    epoch: int
    lsn: Lsn


class LsnWindow(NamedTuple):
    """A half-open range of WAL, [start, end), of one epoch, which is one Dagster partition.

    A transaction belongs to the window if start <= commit_lsn < end. Postgres resumes with the
    first commit record at or after the confirmed position, so the confirmation of exactly `end`
    neither repeats nor skips a transaction.

    Attributes:
        epoch: 1 to 9999.
        start: LSN, inclusive.
        end: LSN, exclusive.
    """

    epoch: int
    start: Lsn
    end: Lsn

    @classmethod
    def of(cls, epoch: int, start: int, end: int) -> LsnWindow:
        """Return a window after a check of its parts.

        Raises:
            ValueError: the epoch is not 1 to 9999, or the range is empty or reversed.
        """
        if not 1 <= epoch <= 9999:
            raise ValueError(f"an epoch is 1 to 9999, not {epoch}")
        if start >= end:
            raise ValueError(f"an empty window: {Lsn(start)} is not before {Lsn(end)}")
        return cls(epoch, Lsn(start), Lsn(end))

    @classmethod
    def parse(cls, key: str) -> LsnWindow:
        """Return the window of a key such as `0001-00000000016B3748-00000000016B5000`.

        Raises:
            ValueError: the key has another form, or its range is empty.
        """
        match = _WINDOW_KEY.fullmatch(key)
        if match is None:
            raise ValueError(
                f"not a window key: {key!r} does not have the form EPOCH-START-END in hex"
            )
        return cls.of(int(match[1]), int(match[2], 16), int(match[3], 16))

    @property
    def key(self) -> str:
        """The Dagster partition key. Text order is stream order."""
        return f"{self.epoch:04d}-{int(self.start):016X}-{int(self.end):016X}"

    @property
    def end_position(self) -> Position:
        """The first position after the window."""
        return Position(self.epoch, self.end)

    @property
    def size_bytes(self) -> int:
        """Bytes of WAL from start to end."""
        return int(self.end) - int(self.start)

    def contains(self, commit_lsn: int) -> bool:
        """Return whether a transaction with this commit LSN belongs to the window."""
        return self.start <= commit_lsn < self.end
