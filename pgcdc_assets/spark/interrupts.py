"""Interrupts that arrive while an embedded session waits for an answer of its JVM.

PySpark's own handler of SIGINT calls the JVM on the connection that still waits, so its call fails,
and the jobs continue (`signal_handler` in pyspark/core/context.py). After an error that is neither
an `Exception` nor `KeyboardInterrupt`, such as Dagster's for a signal, py4j continues to use the
connection: the next call waits for the end of the interrupted one, and each later call gets the
answer of the call before it (`send_command` in py4j/clientserver.py).
"""

from __future__ import annotations

import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from py4j.clientserver import ClientServerConnection, JavaClient
from pyspark import SparkContext

_SECONDS_TO_END = 10.0
_MILLISECONDS_BETWEEN = 200


class _CtrlC(BaseException):
    """A `KeyboardInterrupt`, for which py4j would log a stack trace and reset the connection."""


class _Connection(ClientServerConnection):  # type: ignore[misc]
    def send_command(self, command: str) -> Any:
        try:
            return super().send_command(command)
        except KeyboardInterrupt as interrupt:
            raise _CtrlC from interrupt


class _InterruptibleClient(JavaClient):  # type: ignore[misc]
    """Client of a JVM that ends the session's jobs after an interrupt of a call."""

    def send_command(self, command: str, retry: bool = True, binary: bool = False) -> Any:
        try:
            return super().send_command(command, retry=retry, binary=binary)
        except Exception:
            raise
        except BaseException as interrupt:
            waiting = self.get_thread_connection()
            # The answer to this call arrives on the old connection: the next call opens another.
            self.thread_connection.connection = None
            _end_jobs(self, waiting)
            if isinstance(interrupt, _CtrlC):
                raise KeyboardInterrupt from None
            raise

    def _get_connection(self) -> Any:
        connection = super()._get_connection()
        connection.__class__ = _Connection
        return connection


def end_jobs_at_interrupts() -> None:
    """End all jobs of the embedded session when one of its calls is interrupted.

    An interrupt is any `BaseException` that is not an `Exception`. Later calls get their own
    answers, and do not wait for the interrupted one. Repeated calls change nothing.
    """
    context: Any = SparkContext._active_spark_context
    client = context._gateway._gateway_client
    if type(client) is JavaClient:
        client.__class__ = _InterruptibleClient


@contextmanager
def keeping_interrupt_handler() -> Iterator[None]:
    """Restore the handler of SIGINT after the block, which may start an embedded session."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        is_main = threading.current_thread() is threading.main_thread()
        # None: a handler that was not set by Python.
        if is_main and before is not None:
            signal.signal(signal.SIGINT, before)


def _end_jobs(client: JavaClient, waiting: ClientServerConnection | None) -> None:
    """Cancel jobs until the interrupted call has an answer, or for ten seconds.

    The call may not have started its job yet, or may start several.
    """
    context: Any = SparkContext._active_spark_context
    if context is None or context._gateway._gateway_client is not client:
        return
    deadline = time.monotonic() + _SECONDS_TO_END
    # Another error must not replace the interrupt: the JVM or the connection may have ended.
    with suppress(Exception):
        while time.monotonic() < deadline:
            context.cancelAllJobs()
            if waiting is None or waiting.socket is None:
                return
            answer = select.poll()
            answer.register(waiting.socket, select.POLLIN)
            if answer.poll(_MILLISECONDS_BETWEEN):
                return
