"""Interrupts that arrive while SQLAlchemy closes a connection."""

from __future__ import annotations

import sqlite3

import pytest
from dagster._core.errors import DagsterExecutionInterruptedError
from sqlalchemy import create_engine, pool, text

from pgcdc_assets.orchestration.runs.interrupt_log import hide_interrupts


@pytest.mark.parametrize("pool_class", [pool.NullPool, pool.QueuePool])
@pytest.mark.parametrize(
    ("error", "is_logged"),
    [(KeyboardInterrupt, False), (DagsterExecutionInterruptedError, False), (OSError, True)],
)
def test_an_interrupt_is_raised_without_a_record_and_other_errors_are_logged(
    caplog: pytest.LogCaptureFixture,
    pool_class: type[pool.Pool],
    error: type[BaseException],
    is_logged: bool,
) -> None:
    class Connection(sqlite3.Connection):
        def close(self) -> None:
            super().close()
            raise error

    hide_interrupts()
    hide_interrupts()
    engine = create_engine(
        "sqlite://",
        creator=lambda: sqlite3.connect(":memory:", factory=Connection),
        poolclass=pool_class,
    )
    found: BaseException | None = None
    try:
        with engine.connect() as connection:
            connection.execute(text("select 1"))
        engine.dispose()
    except BaseException as raised:
        found = raised
    # SQLAlchemy raises only what is not an `Exception`.
    assert isinstance(found, error) is not is_logged
    assert [record.exc_info is not None for record in caplog.records] == [True] * is_logged
