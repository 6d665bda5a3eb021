"""Statements on the source in a thread of their own, so that an interrupt ends a comparison.

A statement over a large table takes hours, and psycopg2 handles no signal before its end.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

from pgcdc_assets.postgres.backend_cancellation import end_session
from pgcdc_assets.postgres.copy.digests import SourceTable

_ROWS_A_CALL = 10_000

_Result = TypeVar("_Result")


class SourceCalls:
    """Runs calls one after the other, until the end of the block.

    If the block ends by an error or an interrupt, the sessions of the tables end.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "pgcdc-verify")
        self._sources: list[SourceTable] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            for source in self._sources:
                self.end(source)
        self._pool.shutdown()

    def add(self, source: SourceTable) -> None:
        """End the session of a table too."""
        self._sources.append(source)

    def end(self, source: SourceTable) -> None:
        """End the session of a table, with the statement that runs or comes next.

        The cancellation of a statement could arrive before the statement, or not at all behind a
        pooler.
        """
        end_session(source.settings, source.connection)

    def submit(self, call: Callable[[], _Result]) -> Future[_Result]:
        """Run a call after the earlier ones."""
        return self._pool.submit(call)

    def iterate(self, rows: Iterator[_Result]) -> Iterator[_Result]:
        """Yield the rows of an iterator that executes statements."""
        while portion := self.submit(lambda: list(itertools.islice(rows, _ROWS_A_CALL))).result():
            yield from portion
