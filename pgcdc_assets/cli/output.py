"""What commands say besides their result, and where to."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path


def say(line: str) -> None:
    """Show progress, with the time, where it does not mix with the result."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def quiet_dagster(debug: bool) -> None:
    """Keep Dagster's own log off the terminal."""
    logging.getLogger("dagster").setLevel(logging.DEBUG if debug else logging.CRITICAL)


def spark_log(debug: bool) -> Path | None:
    """Say where an embedded Spark session writes what it has to say; None: to the terminal."""
    from pgcdc_assets.orchestration.defaults import state_folder

    return None if debug else state_folder() / "spark.log"
