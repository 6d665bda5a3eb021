"""Output of commands besides the result: progress, errors, and the log of libraries."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from pgcdc_assets.cli.library_log import LibraryLog, open_library_log, terminal
from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.orchestration.project.home import state_folder


def say(line: str) -> None:
    """Print a line of progress with the time, on another stream than the result."""
    _print(f"{time.strftime('%H:%M:%S')} {line}")


def complain(sentence: str) -> None:
    """Print an error."""
    _print(f"pgcdc: {sentence}")


def _print(line: str) -> None:
    try:
        print(line, file=terminal(), flush=True)
    except OSError:
        # The work does not end with the reader of its progress, nor if the disk of a file is full.
        discard(terminal())


def discard(stream: TextIO) -> None:
    """Send further output of a stream nowhere, if its reader has ended or its disk is full.

    Otherwise Python fails at its exit, when it writes the rest, with an exit status of its own.
    """
    with open(os.devnull, "w") as nowhere, suppress(OSError, ValueError):
        os.dup2(nowhere.fileno(), stream.fileno())


def flush_result() -> None:
    """Write the rest of the result.

    A process may have no standard output, as by a shell's `>&-`.

    Raises:
        BrokenPipeError: the reader of the result has ended.
    """
    if sys.stdout is not None:
        sys.stdout.flush()


def quiet_dagster(*, debug: bool) -> None:
    """Keep Dagster's log and its warnings about beta and preview features off the terminal."""
    from pgcdc_assets.orchestration.feature_warnings import ignore_feature_warnings

    logging.getLogger("dagster").setLevel(logging.DEBUG if debug else logging.CRITICAL)
    if not debug:
        ignore_feature_warnings()


def open_log(command: str) -> LibraryLog | None:
    """Send the output of libraries to a log file; None if no folder is writable."""
    if sys.stderr is None:
        return None
    folders: list[Path] = []
    # The command itself reports that there is no state folder.
    with suppress(ConfigurationError):
        folders.append(state_folder() / "logs")
    with suppress(OSError):
        folders.append(Path(tempfile.gettempdir()) / "pgcdc-logs")
    for folder in folders:
        with suppress(OSError):
            return open_library_log(folder, command)
    return None
