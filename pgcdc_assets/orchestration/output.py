"""Keeping the terminal for what a person wants to read."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def stderr_to(path: Path | None) -> Iterator[None]:
    """Send error output to a file inside the block, and that of programs started in it for good.

    A JVM keeps the descriptors that it is started with: its own log then goes to the file, and the
    terminal stays with our progress lines. With None nothing is changed.
    """
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with path.open("ab") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
