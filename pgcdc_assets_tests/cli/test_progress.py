"""The progress of a command: one updated line on a terminal, separate lines elsewhere."""

from __future__ import annotations

import io
import os
import pty
import re
import threading
import time

import pytest

from pgcdc_assets.activity import activity, watched_by
from pgcdc_assets.cli.progress import ProgressDisplay
from pgcdc_assets.demo.console import Lines


def test_without_a_terminal_each_activity_is_a_line_and_long_activities_have_several() -> None:
    stream = io.StringIO()
    with ProgressDisplay(stream, every_seconds=0.05).shown() as display:
        display.say("t_snapshot: public.a")
        with activity("snapshot of public.a", "rows") as work:
            work.count = 12_345
            deadline = time.monotonic() + 30
            while "... " not in stream.getvalue() and time.monotonic() < deadline:
                time.sleep(0.01)
    lines = stream.getvalue().splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in lines)
    assert re.search(r"^\S+   \.\.\. snapshot of public\.a: 12,345 rows, \d", lines[1])
    assert re.search(r"^\S+   snapshot of public\.a: 12,345 rows, \d+\.\d s$", lines[-1])
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize("place", ["a pipe without a reader", "a full disk"])
def test_the_work_continues_after_its_progress_cannot_be_shown(place: str) -> None:
    opened: str | int = "/dev/full"
    if place != "a full disk":
        reader, opened = os.pipe()
        os.close(reader)
    before = os.stat("/dev/stdout")
    with open(opened, "w") as stream:
        with ProgressDisplay(stream, every_seconds=0.01).shown() as display:
            display.say("t_snapshot: public.a")
            with activity("snapshot of public.a", "rows") as work:
                time.sleep(0.1)
                work.count = 1
            display.say("done")
    assert work.is_done
    assert os.path.samestat(before, os.stat("/dev/stdout"))


def test_a_terminal_has_one_line_that_is_updated() -> None:
    reader, writer = pty.openpty()
    shown = b""

    def read() -> None:
        nonlocal shown
        while True:
            try:
                part = os.read(reader, 4096)
            except OSError:
                return
            shown += part

    thread = threading.Thread(target=read)
    thread.start()
    with (
        open(writer, "w") as terminal,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TERM", "xterm")
        with (
            ProgressDisplay(terminal).shown(),
            activity("merge of public.[a]", "changes") as work,
        ):
            for count in (100, 200):
                work.count = count
                deadline = time.monotonic() + 30
                while f"{count} changes".encode() not in shown and time.monotonic() < deadline:
                    time.sleep(0.01)
    thread.join(timeout=30)
    os.close(reader)
    text = shown.decode()
    assert re.search(r"merge of public\.\[a\]: 100 changes, .*merge of .*200 changes", text, re.S)
    assert "\x1b[2K" in text, "the line is erased"


def test_a_failed_activity_is_shown_as_failed() -> None:
    stream = io.StringIO()
    with ProgressDisplay(stream).shown(), pytest.raises(ValueError), activity("copy", "rows"):
        raise ValueError
    assert stream.getvalue().rstrip().endswith("(failed)")


def test_activities_of_other_threads_are_shown_until_the_end_of_the_block() -> None:
    seen: list[str] = []

    def work() -> None:
        with activity("merge", "changes") as shown:
            shown.count = 3

    with watched_by(Lines(seen.append)):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    work()
    (line,) = seen
    assert line.startswith("  merge: 3 changes, ")
