"""A running `dagster dev` for tests, with daemon, code server and webserver."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
from dagster._core.scheduler.instigation import TickStatus

from pgcdc_assets.demo.dagster_dev import start_dagster, stop_dagster
from pgcdc_assets.local import free_port
from pgcdc_assets.spark.server import SparkServer
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated
from pgcdc_assets_tests.support.waits import wait_until

ROOT = Path(__file__).parents[3]
SECONDS = 240

_CAPTURE = """
import dagster as dg
from pgcdc_assets import CdcCapture, CdcTable, build_cdc_definitions, on_new_merges
from pgcdc_assets.orchestration.resources import LakeResource, PostgresResource
from pgcdc_assets.settings.policies import WindowPolicy

cdc = [build_cdc_definitions(
    CdcCapture(
        {name!r},
        "pub",
        tuple(CdcTable("public", table) for table in {tables!r}),
        slot={slot!r},
        windows=WindowPolicy(max_age_seconds=1, retry_seconds=2),
    ),
    postgres=PostgresResource(capture={name!r}, conninfo={conninfo!r}),
    lake=LakeResource(uri={lake!r}),
)]
"""

_LOADED = """
{ workspaceOrError { ... on Workspace { locationEntries { locationOrLoadError {
    __typename ... on PythonError { message } } } } } }
"""


@dataclass(frozen=True)
class Daemon:
    """A running Dagster."""

    instance: dg.DagsterInstance
    port: int

    def ask(self, query: str, variables: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Query the webserver by GraphQL, as the UI does."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/graphql",
            json.dumps({"query": query, "variables": variables or {}}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            answer: dict[str, Any] = json.load(response)
        assert "errors" not in answer, answer["errors"]
        data: dict[str, Any] = answer["data"]
        return data

    def is_serving(self) -> bool:
        """Return whether the UI answers; the code location must then be loaded."""
        try:
            found = self.ask(_LOADED)["workspaceOrError"]["locationEntries"]
        except OSError:
            return False
        assert all(entry["locationOrLoadError"].get("message") is None for entry in found), found
        return bool(found)

    def ticks(self, sensor: str, after: float) -> int:
        """Return the number of successful evaluations of a sensor that began after a time."""
        for state in self.instance.all_instigator_state():
            if state.instigator_name == sensor:
                ticks = self.instance.get_ticks(
                    state.instigator_origin_id,
                    state.selector_id,
                    after=after,
                    statuses=[TickStatus.SUCCESS, TickStatus.SKIPPED],
                )
                return len(ticks)
        return 0


@contextmanager
def running_daemon(orchestrated: Orchestrated, folder: Path, code: str) -> Iterator[Daemon]:
    """Run Dagster with a capture of the test's tables `a` and `b`, and with further code.

    Args:
        code: Python code that defines `defs`; the list `cdc` has the capture's definitions.
    """
    module = folder / "location.py"
    values = {
        "name": NAME,
        "tables": [table.table for table in orchestrated.capture.tables],
        "slot": orchestrated.capture.slot,
        "conninfo": orchestrated.database.conninfo,
        "lake": orchestrated.lake.uri,
    }
    module.write_text(_CAPTURE.format(**values) + code)
    port = free_port()
    log = folder / "dagster.log"
    with SparkServer(folder / "state").running(lambda line: None) as spark, log.open("wb") as out:
        environment = {
            "DAGSTER_HOME": str(folder / "dagster"),
            "PGCDC_SPARK_REMOTE": spark.remote,
            "PYTHONPATH": str(ROOT),
        }
        arguments = ["-f", str(module), "-h", "127.0.0.1", "-p", str(port)]
        process = start_dagster(arguments, folder, environment, out)
        try:
            daemon = Daemon(orchestrated.instance, port)
            wait_until(daemon.is_serving, "Dagster to serve", limit_seconds=SECONDS)
            yield daemon
        except BaseException as error:
            error.add_note(log.read_text(errors="replace")[-6000:])
            raise
        finally:
            stop_dagster(process)
