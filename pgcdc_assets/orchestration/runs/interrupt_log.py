"""Log records of interrupts that SQLAlchemy writes with a stack trace.

A signal may arrive while SQLAlchemy closes a connection of Dagster's storage. SQLAlchemy logs each
error of `close`, and raises the interrupt again. The run reports the interrupt itself.
"""

from __future__ import annotations

import logging

from dagster._core.errors import DagsterExecutionInterruptedError

# A filter applies only to records of its own logger, and each class of pools has a logger.
_POOLS = ("NullPool", "QueuePool", "SingletonThreadPool", "StaticPool")


def hide_interrupts() -> None:
    """Drop records of interrupts from the loggers of SQLAlchemy's pools, once or repeatedly."""
    for each in _POOLS:
        logging.getLogger(f"sqlalchemy.pool.impl.{each}").addFilter(_is_no_interrupt)


def _is_no_interrupt(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    return not isinstance(error, KeyboardInterrupt | DagsterExecutionInterruptedError)
