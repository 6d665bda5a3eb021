"""Errors of other libraries in sentences, numbers of the operating system, names, counts."""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence

# The disk is full, or a quota or the largest size of a file is reached.
FULL_DISK = frozenset((errno.EFBIG, errno.ENOSPC, errno.EDQUOT))

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_OF_SYSTEM = re.compile(r"[^:\n↳]*\(os error \d+\)")


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or the name of its class if the text is empty.

    delta-rs puts causes on lines of their own. That of the operating system is appended.
    """
    text = _COLOUR.sub("", str(error))
    first, _, rest = text.partition("\n")
    cause = _OF_SYSTEM.search(rest)
    found = first.rstrip() or type(error).__name__
    return f"{found}: {cause[0].strip()}" if cause else found


def first_sentence(error: Exception) -> str:
    """Return the first line of an error's text with one full stop at its end."""
    return f"{first_line(error).rstrip('.')}."


def first_names(names: Sequence[str], most: int) -> str:
    """Return the first names of a list, and the number of the others."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def counted(number: int, noun: str) -> str:
    """Return a number and a noun, in the plural for any other number than 1."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
