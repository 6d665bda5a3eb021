"""An interrupt while an embedded session waits for its JVM, such as the end of a run."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from dagster._core.errors import DagsterExecutionInterruptedError
from pyspark.sql import SparkSession

from pgcdc_assets.spark.session import own_session

pytestmark = [pytest.mark.spark]


@contextmanager
def _interrupted(error: type[BaseException], seconds: float) -> Iterator[None]:
    """Raise an error in the main thread, as the handler of a signal."""

    def interrupt(*_: Any) -> None:
        raise error("interrupted")

    # pytest-timeout uses the same timer for the limit of this test.
    limit, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, limit)


@pytest.mark.sampled
@pytest.mark.parametrize("seconds", [0.01, 2.0], ids=["before the job", "during the job"])
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, DagsterExecutionInterruptedError, pytest.fail.Exception]
)
def test_an_interrupt_ends_the_jobs_and_later_calls_get_their_own_answers(
    embedded_session: SparkSession,
    error: type[BaseException],
    seconds: float,
    caplog: pytest.LogCaptureFixture,
) -> None:
    session = own_session(embedded_session)
    # Without generated code, the tasks of this query do not look for their end.
    session.conf.set("spark.sql.codegen.wholeStage", "true")
    endless = session.range(1 << 60).selectExpr("sum(hash(id))")
    with pytest.raises(error) as kept, _interrupted(error, seconds):
        endless.collect()
    started = time.monotonic()
    # `kept` holds the frames of the error, as a debugger or pytest does, and as each handler of
    # the error does while it runs.
    answers = [session.range(n, n + 1).selectExpr("sum(id)").first() for n in range(5)]
    assert answers == [(n,) for n in range(5)], kept
    assert time.monotonic() - started < 60
    assert not caplog.records


def test_a_session_keeps_the_handler_of_ctrl_c(embedded_session: SparkSession) -> None:
    """PySpark's own handler calls the JVM on the connection that still waits."""
    assert embedded_session is not None
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
