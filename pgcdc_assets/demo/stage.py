"""The environment of the demonstrations: server, shop, workload and lake.

All state is in `.pgcdc`, in the clone or else in the current folder. A demonstration continues with
the existing state. This process ignores the settings of a user's own pipeline (PGCDC_DSN,
PGCDC_LAKE, DAGSTER_HOME and so on), so the demonstration does not touch another database, lake or
Dagster instance.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from pgcdc_assets.demo import shop
from pgcdc_assets.demo.console import print_progress, say
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.local import locked
from pgcdc_assets.orchestration.project.home import embedded_data_folder, state_folder

_PUT_ASIDE = ("PGCDC_DSN", "PGCDC_LAKE", "PGCDC_SPARK_REMOTE", "DAGSTER_HOME")


@dataclass(frozen=True)
class Stage:
    """The running server with the shop in it."""

    server: EmbeddedServer

    @property
    def conninfo(self) -> str:
        """Connection string of the shop's database."""
        return self.server.conninfo(shop.DATABASE)


@contextmanager
def stage(*, fresh: bool, scale: float) -> Iterator[Stage]:
    """Start the server and create the shop; stop the server at the end, and keep its data.

    Args:
        fresh: first delete the state of earlier demonstrations.
        scale: size of the shop; 1 is 10,000 orders.

    Raises:
        ConfigurationError: another demonstration runs in this folder.
    """
    folder = state_folder()
    for name in _PUT_ASIDE:
        if os.environ.pop(name, None):
            say(f"{name} is ignored, because the demonstration sets it")
    with _alone(folder):
        server = EmbeddedServer(embedded_data_folder())
        if fresh:
            say(f"Deleting the state of earlier demonstrations in {folder}")
            server.remove()
            for leftover in ("lake", "dagster"):
                shutil.rmtree(folder / leftover, ignore_errors=True)
        say(f"Starting Postgres {server.version} in {server.data_dir}")
        with print_progress(lambda: "Postgres starts"):
            server.start()
        try:
            with print_progress(lambda: "the shop opens"):
                _open_shop(server, scale)
            yield Stage(server)
        finally:
            server.stop()
            say("Postgres is stopped; its data is kept")


def _open_shop(server: EmbeddedServer, scale: float) -> None:
    shop.create_database(server.conninfo())
    conninfo = server.conninfo(shop.DATABASE)
    if shop.exists(conninfo):
        say(f"The shop exists from an earlier demonstration, on port {server.port}")
    else:
        say(f"Filling the shop's tables, on port {server.port}")
        shop.create(conninfo, scale)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    with ExitStack() as held:
        try:
            held.enter_context(locked(folder / "demo.lock", is_awaited=False))
        except BlockingIOError as error:
            raise ConfigurationError(
                reason=f"The sample shop is already running in {folder.parent}: stop it first"
            ) from error
        yield


class LiveWorkload:
    """The workload in a child process."""

    def __init__(self, conninfo: str, *, connections: int, rate: float) -> None:
        self._child = subprocess.Popen(
            [
                *(sys.executable, "-m", "pgcdc_assets.demo.workload"),
                *("--conninfo", conninfo),
                *("--connections", str(connections), "--rate", str(rate)),
                # Use a new seed, so that the choices do not repeat when a demonstration continues.
                *("--seed", str(os.getpid())),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )

    def stop(self) -> dict[str, int]:
        """End the workload; return the number of commits of each action."""
        self._child.send_signal(signal.SIGTERM)
        try:
            output, _ = self._child.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self._child.kill()
            raise
        if self._child.returncode != 0:
            raise ConfigurationError(
                reason="the shop's workload failed: its message is above or in "
                f"{state_folder() / 'logs'}"
            )
        counts: dict[str, int] = json.loads(output)
        return counts

    def __enter__(self) -> LiveWorkload:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._child.poll() is None:
            self._child.terminate()
            self._child.wait()
        if self._child.stdout is not None:
            self._child.stdout.close()
