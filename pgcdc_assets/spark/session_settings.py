"""Settings of a session for a block of statements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@contextmanager
def session_settings(session: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Set settings for the block, and then restore the previous values.

    Args:
        session: a session that no other thread uses at the same time.
    """
    previous = {name: session.conf.get(name, None) for name in settings}
    for name, value in settings.items():
        session.conf.set(name, value)
    try:
        yield
    finally:
        for name, before in previous.items():
            if before is None:
                session.conf.unset(name)
            else:
                session.conf.set(name, before)
