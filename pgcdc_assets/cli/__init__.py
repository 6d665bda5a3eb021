"""The command line: `pgcdc COMMAND`, listed by `pgcdc --help`.

A command that fails prints one sentence. The exit status is 2 for wrong settings, 3 for a transient
error, 4 for a state in which a person has to decide, and 1 for a difference that was found and for
any other error. `--debug` shows the stack trace. The output of libraries goes to a log file, or to
the terminal with `--verbose`.
"""

from __future__ import annotations

import argparse
import gc
import io
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType

from pgcdc_assets.cli.arguments import build_parser
from pgcdc_assets.cli.library_log import LibraryLog
from pgcdc_assets.cli.output import complain, discard, flush_result, open_log
from pgcdc_assets.errors import ConfigurationError, PgcdcError

INTERRUPTED = 130

# The imports of a command make 180,000 objects that live until its end. With the default of 700,
# the collector searches them dozens of times during the start.
_ALLOCATIONS_BEFORE_COLLECTION = 10_000

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# The signals that have interrupted the command.
_interrupts: list[int] = []


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    is_own_process = arguments is None
    _interrupts.clear()
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    signal.signal(signal.SIGTERM, _interrupt)
    if before[signal.SIGINT] is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    if before[signal.SIGHUP] is signal.SIG_DFL:
        # `nohup` starts a command with the signal ignored.
        signal.signal(signal.SIGHUP, _terminate)
    try:
        return _main(arguments, is_own_process=is_own_process)
    except KeyboardInterrupt:
        complain("Interrupted.")
        return INTERRUPTED
    finally:
        for number, handler in before.items():
            if not is_own_process:
                signal.signal(number, handler)
            elif signal.getsignal(number) is not signal.SIG_IGN:
                # Python would print a stack trace if a signal interrupts its exit.
                signal.signal(number, signal.SIG_DFL)


def _main(arguments: Sequence[str] | None, *, is_own_process: bool) -> int:
    if is_own_process:
        gc.set_threshold(_ALLOCATIONS_BEFORE_COLLECTION, *gc.get_threshold()[1:])
        if isinstance(sys.stdout, io.TextIOWrapper):
            # A name of a table may have characters that the encoding of the terminal lacks.
            sys.stdout.reconfigure(errors="backslashreplace")
    options = _parse(arguments)
    log = None if options.debug or options.verbose else open_log(options.name_of_command)
    try:
        return _run(options, log)
    finally:
        if log is not None and is_own_process:
            # Keep the redirection, because libraries also write at the end of the process.
            log.settle()
        elif log is not None:
            log.close()
        if is_own_process:
            # At its end the interpreter collects all objects, which takes up to two seconds.
            gc.freeze()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments. `--help`, `--version` and a wrong argument end the process here."""
    try:
        try:
            return build_parser().parse_args(arguments)
        except SystemExit:
            # Python would fail when it writes the rest at its exit.
            flush_result()
            raise
    except BrokenPipeError:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                discard(stream)
        raise SystemExit(INTERRUPTED) from None
    except OSError as error:
        discard(sys.stdout)
        complain(f"The help cannot be written: {error.strerror}.")
        raise SystemExit(1) from None


def _run(options: argparse.Namespace, log: LibraryLog | None) -> int:
    try:
        _check_texts(options)
        # Commands import late, so that `--help` and usage errors do not wait for Dagster.
        status: int = options.command(options)
        flush_result()
        return status
    except PgcdcError as error:
        capture: str | None = getattr(options, "name", None)
        named = error if capture is None else error.in_capture(capture)
        return _fail(str(named), error.exit_status, log, debug=options.debug)
    except KeyboardInterrupt:
        return _fail("Interrupted.", INTERRUPTED, None, debug=False)
    except BrokenPipeError:
        discard(sys.stdout)
        return INTERRUPTED
    except OSError as error:
        if error.filename is None or error.strerror is None:
            return _fail_unexpectedly(error, log, debug=options.debug)
        return _fail(f"{error.filename}: {error.strerror}", 1, log, debug=options.debug)
    except Exception as error:
        if _interrupts:
            # Some libraries raise another error for an interrupt, such as pydantic's SchemaError.
            return _fail("Interrupted.", INTERRUPTED, None, debug=options.debug)
        return _fail_unexpectedly(error, log, debug=options.debug)


def _check_texts(options: argparse.Namespace) -> None:
    """Check that the arguments are texts. Paths may have any bytes.

    Raises:
        ConfigurationError: an argument has bytes that are not UTF-8. The error does not quote them.
    """
    for name, value in vars(options).items():
        for text in value if isinstance(value, list) else [value]:
            try:
                if isinstance(text, str):
                    text.encode()
            except UnicodeEncodeError:
                raise ConfigurationError(reason=f"Argument {name} is not valid UTF-8.") from None


def _fail_unexpectedly(error: Exception, log: LibraryLog | None, *, debug: bool) -> int:
    name = type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        name = f"{name} ({error.strerror})"
    sentence = f"Unexpected {name}: run again with --debug for a stack trace."
    return _fail(sentence, 1, log, debug=debug)


def _fail(sentence: str, status: int, log: LibraryLog | None, *, debug: bool) -> int:
    try:
        # Without a log, the result waits in a buffer. Python would fail when it writes the rest.
        flush_result()
    except OSError:
        discard(sys.stdout)
    if debug:
        traceback.print_exc()
    if log is not None and log.has_content():
        sentence = f"{sentence.rstrip('.')}. Output of libraries is in {log.path}"
    complain(sentence)
    return status


def _interrupt(number: int, frame: FrameType | None) -> None:
    _interrupts.append(number)
    raise KeyboardInterrupt


def _terminate(number: int, frame: FrameType | None) -> None:
    """Handle SIGHUP like SIGTERM, whose handler may be that of a run."""
    signal.raise_signal(signal.SIGTERM)
