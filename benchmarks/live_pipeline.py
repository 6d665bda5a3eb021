"""What the benchmarks of a running pipeline share: `dagster dev`, and a comparison at the end."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.source import log
from pgcdc_assets.demo.dagster_dev import start_dagster, stop_dagster
from pgcdc_assets.local import free_port
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.verify import compare_table


def environment_of(conninfo: str, folder: Path, home: Path, remote: str) -> dict[str, str]:
    """Return the environment of a code location with its lake in a folder.

    Args:
        home: Dagster's home.
        remote: the address of the Spark server, or `local`.
    """
    return {
        "PGCDC_DSN": conninfo,
        "PGCDC_LAKE": str(folder / "lake"),
        "PGCDC_SPARK_REMOTE": remote,
        "DAGSTER_HOME": str(home),
    }


@contextmanager
def running_dagster(
    module: str, folder: Path, environment: Mapping[str, str]
) -> Iterator[tuple[int, Callable[[], None]]]:
    """Run `dagster dev` inside the block; yield its pid, and a check that it is running.

    Args:
        module: the code location.
        folder: where its log is written.
    """
    log_file = folder / "dagster.log"
    # A background job of a shell ignores SIGINT, which Dagster would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    arguments = ["-m", module, "-h", "127.0.0.1", "-p", str(free_port())]
    with log_file.open("wb") as output:
        process = start_dagster(arguments, Path(__file__).parents[1], environment, output)

    def check() -> None:
        if process.poll() is not None:
            raise SystemExit(f"Dagster ended with status {process.returncode}")

    try:
        yield process.pid, check
    except SystemExit:
        log(f"End of Dagster's log:\n{log_file.read_text(errors='replace')[-3000:]}")
        raise
    finally:
        stop_dagster(process)


def count_equal_rows(conninfo: str, zone: RawZone, publication: str, names: Sequence[str]) -> int:
    """Return the number of rows of all tables, which must equal their source."""
    settings = ConnectionSettings(conninfo=conninfo, name=zone.name)
    rows = 0
    for name in names:
        found = compare_table(settings, zone, publication, "public", name)
        if not found.is_equal:
            raise SystemExit(f"the table {name} differs from its source: {found}")
        rows += found.target_rows
    return rows
