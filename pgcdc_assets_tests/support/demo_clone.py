"""A copy of the clone's files in which a demonstration runs with its own state."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pgcdc_assets.demo.server import EmbeddedServer

_ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def demo_clone(prefix: str) -> Iterator[Path]:
    """Copy the files, readable by the server's user; delete them and the server at the end.

    Args:
        prefix: of the name of the temporary folder.
    """
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(_ROOT / "pgcdc_assets", folder / "pgcdc_assets", ignore=ignore)
        for name in ("pyproject.toml", "workspace.yaml"):
            shutil.copy(_ROOT / name, folder)
        yield folder
    finally:
        server_of(folder).remove()
        shutil.rmtree(folder)


def server_of(clone: Path) -> EmbeddedServer:
    """Return the Postgres server of the demonstrations in a copy."""
    return EmbeddedServer(clone / ".pgcdc" / "postgres")
