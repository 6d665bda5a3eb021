"""Files and folders that the tests' process may not read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_OTHER_USER = 65534


@contextmanager
def without_access(path: Path) -> Iterator[None]:
    """Deny the access: root becomes another user, and another user changes the mode."""
    is_root, mode = os.geteuid() == 0, path.stat().st_mode
    path.chmod(0o700 if is_root else 0)
    try:
        if is_root:
            os.seteuid(_OTHER_USER)
        yield
    finally:
        if is_root:
            os.seteuid(0)
        path.chmod(mode)
