"""Parts of the texts of other libraries' errors, for sentences of the package's errors."""

from __future__ import annotations


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or the name of its class if the text is empty."""
    return (str(error).splitlines() or [type(error).__name__])[0]
