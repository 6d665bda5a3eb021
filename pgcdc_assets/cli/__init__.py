"""The command line: `pgcdc check | init | sync | status | verify | rebuild | renew | spark`.

Each command ends with one clear sentence when something is wrong, and with a status that says what
to do: 2 fix the settings, 3 try again, 4 a person has to decide, 1 anything else, a found
difference included. A stack trace is shown with `--debug` only.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType

from pgcdc_assets.cli.arguments import build_parser
from pgcdc_assets.errors import PgcdcError

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        # Commands import what they need when they run: --help and usage errors come at once.
        status: int = options.command(options)
        return status
    except PgcdcError as error:
        return _fail(str(error), error.exit_status, debug=options.debug)
    except KeyboardInterrupt:
        return _fail("Interrupted.", INTERRUPTED, debug=False)
    except BrokenPipeError:
        return INTERRUPTED
    except Exception as error:
        sentence = f"Unexpected {type(error).__name__}: run again with --debug to see where."
        return _fail(sentence, 1, debug=options.debug)


def _fail(sentence: str, status: int, *, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"pgcdc: {sentence}", file=sys.stderr)
    return status


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
