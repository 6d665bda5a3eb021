"""Spark settings in a file for `spark-submit`, because every user can read a command line (ps).

Spark reads the file with `java.util.Properties`, and removes blanks at both ends of a value.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from pgcdc_assets.errors import ConfigurationError

_PLAIN = re.compile(r"[A-Za-z0-9._-]")
# What `Utils.trimExceptCRLF` of Spark removes at the ends of a value.
_REMOVED = re.compile(r"[\0-\t\v\f\x0e- ]|.*[\0-\t\v\f\x0e- ]\Z", re.DOTALL)


@contextmanager
def properties_file(conf: Mapping[str, str], folder: Path) -> Iterator[Path]:
    """Write settings to a file that only this user can read, and delete it after the block."""
    descriptor, name = tempfile.mkstemp(".conf", "spark-", folder)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            for setting, value in conf.items():
                file.write(f"{_escaped(setting)}={_escaped(value)}\n")
        yield Path(name)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name)


def check_values(conf: Mapping[str, str]) -> None:
    """Check that Spark reads the values of a file as they are.

    Raises:
        ConfigurationError: a value begins or ends with a blank. The error does not contain it.
    """
    for setting, value in conf.items():
        if _REMOVED.match(value):
            raise ConfigurationError(
                reason=f"The Spark setting {setting} begins or ends with a blank, which Spark "
                "removes from the settings of a server. Set it without the blank"
            )


def _escaped(text: str) -> str:
    """Escape each character of a name or a value that may have a meaning."""
    return "".join(each if _PLAIN.match(each) else _escape(each) for each in text)


def _escape(character: str) -> str:
    """Return an escape for each UTF-16 code unit of a character."""
    digits = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{digits[at : at + 4]}" for at in range(0, len(digits), 4))
