"""The arguments of the commands."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pgcdc_assets import __version__
from pgcdc_assets.cli.output import quiet_dagster

_EPILOG = """\
environment:
  PGCDC_DSN           libpq URI of the source; unset: the server of the sample shop
  PGCDC_STATE         folder of logs and the Spark server, and by default of the lake and Dagster;
                      unset: .pgcdc
  PGCDC_LAKE          folder or object-store URI; unset: lake in PGCDC_STATE
  PGCDC_SPARK_REMOTE  Spark Connect address, or `local` for an embedded session; unset: the server
                      of `pgcdc spark start` if it runs, else an embedded session
  DAGSTER_HOME        folder of the Dagster instance; unset: dagster in PGCDC_STATE

exit status:
  0 done   1 difference found, or unexpected error   2 settings are wrong
  3 run again   4 a person has to decide   130 interrupted
"""

# The operating system does not sleep for centuries.
_LONGEST_INTERVAL = 1e9


class _Parser(argparse.ArgumentParser):
    """A parser that raises the errors of the stream to which it writes. argparse ignores them."""

    def _print_message(self, message: str, file: Any = None) -> None:
        stream = sys.stderr if file is None else file
        if message and stream is not None:
            stream.write(message)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    parser: argparse.ArgumentParser = _Parser(
        prog="pgcdc",
        description="Postgres change data capture as Dagster assets.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    check = _command(
        commands, "check", "check a source database, and print the SQL for what is missing"
    )
    _capture_options(check)
    check.add_argument("--publication", help="check this publication, even if it is not declared")
    check.add_argument(
        "--slot",
        help="with --publication: the replication slot; default: pgcdc_NAME, or pgcdc_PUBLICATION "
        "without --name",
    )

    init = _command(commands, "init", "check a source, then declare its capture")
    init.add_argument("--name", required=True, help="the capture's name: a-z, 0-9 and _")
    init.add_argument("--publication", help="an existing publication; not needed with --update")
    init.add_argument("--slot", help="replication slot; default: pgcdc_NAME")
    init.add_argument(
        "--defs",
        type=Path,
        metavar="DIR",
        help="write DIR/NAME/defs.yaml; default: ./defs. A code location of your own has to load "
        "another DIR, and commands find its captures with -m",
    )
    init.add_argument("--force", action="store_true", help="replace an existing defs.yaml")
    init.add_argument(
        "--all-tables",
        action="store_true",
        help="write `tables: all`, which follows the publication, instead of a list of its tables",
    )
    init.add_argument(
        "--failover",
        action="store_true",
        help="write `failover: true`, so that standbys may keep a copy of the slot (Postgres 17)",
    )
    init.add_argument(
        "--update",
        action="store_true",
        help="add the publication's new tables to the existing file, and only print other "
        "differences",
    )

    sync = _command(
        commands,
        "sync",
        "capture and merge every change that was committed before the start",
    )
    _capture_options(sync)
    _wait_option(sync)
    sync.add_argument(
        "--adopt-slot",
        action="store_true",
        help="with --name: take over a slot that another consumer has read; a lake that was filled "
        "from this slot then cannot continue",
    )
    sync.add_argument("--json", type=Path, metavar="FILE", help="write the report to a file")

    status = _command(commands, "status", "show slot, lag and each table's watermark")
    _capture_options(status)
    status.add_argument(
        "--watch",
        nargs="?",
        type=_interval,
        const=5.0,
        metavar="SECONDS",
        help="repeat the output at this interval until Ctrl-C; without SECONDS every %(const)g "
        "seconds",
    )

    renew = _command(
        commands,
        "renew",
        "begin a new epoch with a new slot, after the old slot was lost, dropped or advanced",
    )
    _capture_options(renew, name_required=True)
    renew.add_argument(
        "--adopt-slot",
        action="store_true",
        help="drop the old slot even if another lake was filled from it",
    )

    verify = _command(
        commands,
        "verify",
        "compare source and tables at one LSN, and print keys that differ; writers may continue",
    )
    _capture_options(verify)
    verify.add_argument("tables", nargs="*", metavar="SCHEMA.TABLE", help="default: all tables")
    verify.add_argument(
        "--wait-only",
        action="store_true",
        help="wait until the sensors have captured the changes, instead of capturing them here",
    )
    _wait_option(verify)

    rebuild = _command(
        commands,
        "rebuild",
        "build SCD tables from the raw zone alone, without a connection to Postgres",
    )
    rebuild.add_argument("name", metavar="NAME", help="the capture")
    rebuild.add_argument("tables", nargs="*", metavar="SCHEMA.TABLE", help="default: all tables")
    rebuild.add_argument(
        "--through",
        metavar="LSN",
        help="fold the changes before this LSN, such as 16/B374D848; the next merge continues from "
        "this LSN (default: every captured change)",
    )
    _module_option(rebuild)

    resnapshot = _command(
        commands,
        "resnapshot",
        "take new snapshots of tables through Dagster's snapshot job, then capture and merge as "
        "sync does",
    )
    resnapshot.add_argument("name", metavar="NAME", help="the capture")
    resnapshot.add_argument("tables", nargs="*", metavar="SCHEMA.TABLE", help="default: all tables")
    resnapshot.add_argument(
        "--where",
        metavar="CONDITION",
        help="read only the rows of one table that match an SQL condition, and replace the rows "
        "with their keys; other rows stay, also those that the source does not have",
    )
    _wait_option(resnapshot)
    _module_option(resnapshot)

    upkeep = _command(
        commands,
        "upkeep",
        "compact small files, and delete replaced files and expired data, as the daily job of "
        "Dagster's daemon does",
    )
    _capture_options(upkeep)

    spark = _command(
        commands,
        "spark",
        "prepare faster starts of Spark, or start, stop or describe a Spark server",
    )
    spark.add_argument(
        "action",
        choices=("prepare", "start", "stop", "status"),
        help="prepare: write an archive of Java classes, with which each JVM of this user starts "
        "faster; start: the merges of this folder use the server until it is stopped, and start no "
        "JVM",
    )
    spark.add_argument(
        "--memory", metavar="SIZE", help="maximum heap of the server, for start (default: 4g)"
    )
    spark.add_argument(
        "--lake",
        metavar="URI",
        action="append",
        help="a lake whose object store the server reaches, for start; may be repeated (default: "
        "PGCDC_LAKE)",
    )
    spark.add_argument(
        "--conf",
        metavar="NAME=VALUE",
        action="append",
        help="a Spark setting of the server, such as the address of a metastore, for start; may be "
        "repeated",
    )
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, description: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=description,
        description=description[0].upper() + description[1:] + ".",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="show stack traces and Dagster's log")
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="show messages of libraries such as Spark; default: write them to .pgcdc/logs",
    )
    parser.set_defaults(command=_deferred(name), name_of_command=name)
    return parser


def _capture_options(parser: argparse.ArgumentParser, *, name_required: bool = False) -> None:
    default = "" if name_required else "; default: every capture of the module"
    parser.add_argument("--name", required=name_required, help=f"one capture{default}")
    _module_option(parser)


def _module_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-m",
        "--module",
        default="pgcdc_assets.definitions",
        help="Dagster code location that declares the captures (default: %(default)s)",
    )


def _wait_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--wait-seconds",
        type=_wait,
        default=600.0,
        metavar="S",
        help="how long to wait for other runs that hold slot or tables (default: %(default)g)",
    )


def _interval(text: str) -> float:
    seconds = _number(text)
    if not 0 < seconds <= _LONGEST_INTERVAL:
        raise argparse.ArgumentTypeError(
            f"the interval must be above zero, and at most {_LONGEST_INTERVAL:.0f}"
        )
    return seconds


def _wait(text: str) -> float:
    seconds = _number(text)
    if not seconds >= 0:
        raise argparse.ArgumentTypeError("the time must not be negative")
    return seconds


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None


def _deferred(name: str) -> Callable[[argparse.Namespace], int]:
    def run(options: argparse.Namespace) -> int:
        if name != "spark":
            quiet_dagster(debug=options.debug)
        module = importlib.import_module(f"pgcdc_assets.cli.{name}")
        status: int = module.run(options)
        return status

    return run
