"""`python -m pgcdc_assets.demo` runs the demonstration once; with `dev`, until Ctrl-C."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pgcdc_assets.demo.console import say
from pgcdc_assets.errors import PgcdcError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line, and return the exit status."""
    options = _parser().parse_args(arguments)
    say("Loading Dagster and Spark's client")
    try:
        # Import late, so that `--help` and a wrong option do not wait for Dagster.
        from pgcdc_assets.demo.stage import choose_lake

        choose_lake(options.lake)
        if options.mode == "dev":
            from pgcdc_assets.demo.dev import run_dev

            return run_dev(
                connections=options.connections,
                rate=options.rate or 10,
                scale=options.scale,
                port=options.port,
                fresh=options.fresh,
                lake=options.lake,
            )
        from pgcdc_assets.demo.run import run_demo

        return run_demo(
            connections=options.connections,
            rate=options.rate or 100,
            scale=options.scale,
            seconds=options.seconds,
            fresh=options.fresh,
            lake=options.lake,
        )
    except PgcdcError as error:
        if options.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pgcdc_assets.demo", description=__doc__)
    parser.add_argument("mode", nargs="?", choices=["demo", "dev"], default="demo")
    parser.add_argument("--fresh", action="store_true", help="delete earlier state first")
    parser.add_argument(
        "--lake",
        choices=["folder", "s3"],
        default="folder",
        help="a folder, or an S3 server that the demonstration starts",
    )
    parser.add_argument("--connections", type=int, default=4, help="connections of the workload")
    parser.add_argument("--rate", type=float, help="transactions per second of the workload")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="size of the shop; 1: 10,000 orders"
    )
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="duration of the workload before the last sync"
    )
    parser.add_argument("--port", type=int, default=3000, help="port of Dagster, with dev")
    parser.add_argument("--debug", action="store_true", help="show the stack trace of an error")
    return parser


if __name__ == "__main__":
    sys.exit(main())
