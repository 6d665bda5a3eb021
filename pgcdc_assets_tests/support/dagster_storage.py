"""Faster SQLite storage of Dagster in the processes of the tests, with the same tables.

Dagster creates a database for each run, and looks up the newest revision of its schema several
times. Each lookup imports all migrations of Dagster from files, which takes a third of the
processor time of a test that captures a window. Here a process reads the migrations once.

Each event of a run is a commit, for which SQLite waits for the disk. No test depends on Dagster's
storage after a crash of the machine, so here SQLite does not wait.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from alembic.config import Config
    from alembic.script import ScriptDirectory


@pytest.fixture(scope="session")
def quick_dagster_storage() -> Iterator[None]:
    """Read migrations once, and do not wait for the disk."""
    import alembic.script
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    read = alembic.script.ScriptDirectory.from_config
    known: dict[str | None, ScriptDirectory] = {}

    def from_config(config: Config) -> ScriptDirectory:
        location = config.get_main_option("script_location")
        if location not in known:
            known[location] = read(config)
        return known[location]

    event.listen(Engine, "connect", _do_not_wait_for_the_disk)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alembic.script.ScriptDirectory, "from_config", from_config)
        yield
    event.remove(Engine, "connect", _do_not_wait_for_the_disk)


def _do_not_wait_for_the_disk(connection: Any, record: object) -> None:
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA synchronous = OFF")
