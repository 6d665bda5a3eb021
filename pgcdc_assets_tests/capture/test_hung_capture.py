"""A capture with a hanging lake or reader thread ends without a loss."""

from __future__ import annotations

import threading
import time

import pytest

from pgcdc_assets.capture.window import CaptureLimits
from pgcdc_assets.errors import ConnectionLost, TransientError
from pgcdc_assets.postgres.stream.connection import ReplicationStream
from pgcdc_assets.postgres.stream.request import StreamSettings
from pgcdc_assets.raw.delta.files import FileWriter
from pgcdc_assets_tests.support.captures import Capturing

pytestmark = pytest.mark.postgres


def test_a_write_that_hangs_is_abandoned_and_cannot_commit_later(
    capturing: Capturing, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = capturing.begin_with_one_insert()
    released = threading.Event()
    before = set(threading.enumerate())
    finish = FileWriter.finish

    def hang(writer: FileWriter) -> object:
        released.wait(30)
        return finish(writer)

    monkeypatch.setattr(FileWriter, "finish", hang)
    limits = CaptureLimits(total_seconds=1, stream=StreamSettings(end_seconds=1))
    began = time.monotonic()
    with pytest.raises(TransientError, match="does not return"):
        capturing.capture(window, limits)
    assert time.monotonic() - began < 15
    assert capturing.confirmed() == window.start

    monkeypatch.undo()
    released.set()
    for left in set(threading.enumerate()) - before:
        left.join(30)
    assert capturing.captured_through() == window.start
    assert not capturing.capture(window).already_captured
    assert capturing.texts("t") == [["1"]]


def test_the_end_of_the_reader_thread_is_detected(
    capturing: Capturing, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = capturing.begin_with_one_insert()
    monkeypatch.setattr(ReplicationStream, "_run", lambda stream: None)
    with pytest.raises(ConnectionLost, match="reader thread has ended"):
        capturing.capture(window)
    monkeypatch.undo()
    capturing.capture(window)
    assert capturing.texts("t") == [["1"]]


def test_a_reader_that_hangs_is_abandoned_at_the_limit(
    capturing: Capturing, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = capturing.begin_with_one_insert()
    released = threading.Event()
    monkeypatch.setattr(ReplicationStream, "_run", lambda stream: released.wait(30))
    limits = CaptureLimits(total_seconds=1, stream=StreamSettings(end_seconds=0.5))
    began = time.monotonic()
    try:
        with pytest.raises(TransientError, match="took longer than its limit"):
            capturing.capture(window, limits)
        assert time.monotonic() - began < 15
    finally:
        released.set()
    assert capturing.confirmed() == window.start
