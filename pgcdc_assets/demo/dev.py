"""The shop with its live workload, and Dagster with its sensors on, until Ctrl-C.

This process handles SIGINT and SIGTERM, and then ends Dagster, the workload and the servers, in
this order.

A Spark server is started first, so that no run of Dagster starts a JVM. A Spark server that is
already running is used, and is not stopped.
"""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.request

from pgcdc_assets.demo.console import print_progress, say
from pgcdc_assets.demo.dagster_dev import start_dagster, stop_dagster
from pgcdc_assets.demo.interrupts import interrupts_at_signals, interrupts_deferred
from pgcdc_assets.demo.stage import FOLDER, LiveWorkload, Stage, stage
from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.orchestration.project.code_location import DEFAULT_MODULE
from pgcdc_assets.orchestration.project.home import prepare_home, project_root, state_folder
from pgcdc_assets.orchestration.resources import LakeResource
from pgcdc_assets.spark.server import SparkServer

HOST = "127.0.0.1"
WORKSPACE = "workspace.yaml"
_POLL_SECONDS = 0.5


def run_dev(
    *,
    connections: int,
    rate: float,
    scale: float,
    port: int = 3000,
    fresh: bool = False,
    lake: str = FOLDER,
) -> int:
    """Run until interrupted; return 0, or the exit status of Dagster if Dagster ends first.

    `choose_lake` was called.

    Args:
        lake: where the lake is.

    Raises:
        ConfigurationError: the port is in use, or another demonstration runs in this folder.
    """
    _check_free(port)
    try:
        with (
            interrupts_at_signals(),
            stage(lake, fresh=fresh, scale=scale) as set_up,
            SparkServer(state_folder(), lakes=[LakeResource().lake().uri]).running(say),
            LiveWorkload(set_up.conninfo, connections=connections, rate=rate),
        ):
            return _run_dagster(set_up, port)
    except KeyboardInterrupt:
        return 0


def _run_dagster(set_up: Stage, port: int) -> int:
    say("Starting Dagster")
    arguments = [*_code_location(), "-h", HOST, "-p", str(port)]
    environment = {"DAGSTER_HOME": str(prepare_home())}
    dagster: subprocess.Popen[bytes] | None = None
    try:
        # An interrupt between the fork and the assignment would leave Dagster.
        with interrupts_deferred():
            dagster = start_dagster(arguments, project_root(), environment)
        if _answers(dagster, port):
            say(
                f"Dagster: http://{HOST}:{port}  The shop: psql '{set_up.conninfo}'  Ctrl-C stops "
                "all"
            )
        return dagster.wait()
    finally:
        if dagster is not None:
            if dagster.poll() is None:
                say("Stopping Dagster")
            stop_dagster(dagster)


def _code_location() -> list[str]:
    """Return Dagster's arguments: the clone's workspace, or the module of an installed package."""
    if (project_root() / WORKSPACE).is_file():
        return ["-w", WORKSPACE]
    return ["-m", DEFAULT_MODULE]


def _answers(dagster: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until Dagster serves its page; return false if Dagster ends before."""
    with print_progress(lambda: "Dagster starts"):
        while dagster.poll() is None:
            try:
                with urllib.request.urlopen(f"http://{HOST}:{port}/server_info", timeout=5):
                    return True
            except OSError:
                time.sleep(_POLL_SECONDS)
    return False


def _check_free(port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ConfigurationError(
                reason=f"port {port} of {HOST} is in use: stop the program that listens, or choose "
                "another with `python -m pgcdc_assets.demo dev --port 3001`"
            ) from error
