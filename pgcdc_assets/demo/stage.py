"""The environment of the demonstrations: server, shop, workload and lake.

All state is in `.pgcdc`, in the clone or else in the current folder. A demonstration continues with
the existing state. A demonstration with an S3 lake has its own state in `.pgcdc/s3`, because a slot
belongs to one lake. This process ignores the settings of a user's own pipeline (PGCDC_DSN,
PGCDC_LAKE, DAGSTER_HOME, PGSSLMODE, with an S3 lake AWS_PROFILE, and so on). The demonstration
therefore does not touch another database, lake or Dagster instance.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from pgcdc_assets.demo import shop
from pgcdc_assets.demo.console import print_progress, say
from pgcdc_assets.demo.object_store import ObjectStore
from pgcdc_assets.demo.object_store_program import install
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.local import locked
from pgcdc_assets.orchestration.project.home import (
    DSN_VARIABLE,
    SPARK_VARIABLE,
    STATE_VARIABLE,
    embedded_data_folder,
    state_folder,
)
from pgcdc_assets.raw import lake

_PUT_ASIDE = (
    DSN_VARIABLE,
    lake.ENVIRONMENT_VARIABLE,
    SPARK_VARIABLE,
    STATE_VARIABLE,
    "DAGSTER_HOME",
)
# Variables of libpq that apply where a connection string has no parameter: TLS, options, a service.
_OF_LIBPQ, _OWN = "PG", "PGCDC_"
# Variables of Amazon's tools: an endpoint, a profile, a token, certificates.
_OF_AMAZON = "AWS_"

# Where the lake of a demonstration is.
FOLDER, S3 = "folder", "s3"


@dataclass(frozen=True)
class Stage:
    """The running server with the shop in it."""

    server: EmbeddedServer

    @property
    def conninfo(self) -> str:
        """Connection string of the shop's database."""
        return self.server.conninfo(shop.DATABASE)


def choose_lake(kind: str) -> None:
    """Set this process's environment for a demonstration whose lake is of the kind."""
    for name in _PUT_ASIDE:
        if os.environ.pop(name, None):
            say(f"{name} is ignored, because the demonstration sets it")
    _ignore(
        "its own Postgres server",
        [name for name in os.environ if name.startswith(_OF_LIBPQ) and not name.startswith(_OWN)],
    )
    if kind == S3:
        _ignore("its own S3 server", [name for name in os.environ if name.startswith(_OF_AMAZON)])
        os.environ[STATE_VARIABLE] = str(state_folder() / S3)


def _ignore(reason: str, names: Sequence[str]) -> None:
    """Remove variables from the environment, because the demonstration uses its own server."""
    for name in sorted(names):
        if os.environ.pop(name):
            say(f"{name} is ignored, because the demonstration uses {reason}")


@contextmanager
def stage(kind: str, *, fresh: bool, scale: float) -> Iterator[Stage]:
    """Start the servers and create the shop; stop the servers at the end, and keep their data.

    `choose_lake` was called.

    Args:
        kind: where the lake is.
        fresh: first delete the state of earlier demonstrations.
        scale: size of the shop; 1 is 10,000 orders.

    Raises:
        ConfigurationError: another demonstration runs in this folder.
    """
    folder = state_folder()
    with _alone(folder):
        server = EmbeddedServer(embedded_data_folder())
        if fresh:
            say(f"Deleting the state of earlier demonstrations in {folder}")
            server.remove()
            # The file with the number of its process is below its folder.
            ObjectStore(folder / "object-store").end_earlier()
            for leftover in ("lake", "dagster", "object-store"):
                shutil.rmtree(folder / leftover, ignore_errors=True)
        say(f"Starting Postgres {server.version} in {server.data_dir}")
        try:
            # An interrupted start leaves a running server.
            with print_progress(lambda: "Postgres starts"):
                server.start()
            with _object_store(folder / "object-store") if kind == S3 else nullcontext():
                with print_progress(lambda: "the shop opens"):
                    _open_shop(server, scale)
                yield Stage(server)
        finally:
            server.stop()
            say("Postgres is stopped; its data is kept")


@contextmanager
def _object_store(folder: Path) -> Iterator[None]:
    """Run the S3 server, whose address and credentials are in the environment."""
    install(say)
    with ObjectStore(folder) as store:
        say(f"The S3 server runs at {store.endpoint}; the lake is {store.lake}")
        os.environ.update(store.environment)
        os.environ[lake.ENVIRONMENT_VARIABLE] = store.lake
        yield


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
