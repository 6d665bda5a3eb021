"""A source that does not answer, beside other captures of the same Dagster."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from dagster._core.scheduler.instigation import InstigatorTick

from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated
from pgcdc_assets_tests.support.orchestration.daemon import SECONDS, running_daemon
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.soak]

# The connection is accepted by the system, and no server answers until `connect_timeout`.
SILENT = """
cdc.append(build_cdc_definitions(
    CdcCapture("silent", "pub", (CdcTable("public", "a"),), slot="s_silent"),
    postgres=PostgresResource(
        capture="silent", conninfo="host=127.0.0.1 port={port} user=u dbname=d"
    ),
    lake=LakeResource(uri={lake!r}),
))
defs = dg.Definitions.merge(*cdc)
"""


def test_the_sensors_of_other_captures_do_not_wait_for_a_silent_source(
    orchestrated: Orchestrated, tmp_path: Path
) -> None:
    """Each tick of its lag sensor takes ten seconds, and captures of other servers continue."""
    instance = orchestrated.instance

    def ticks(sensor: str) -> list[InstigatorTick]:
        for state in instance.all_instigator_state():
            if state.instigator_name == sensor:
                found = instance.get_ticks(state.instigator_origin_id, state.selector_id)
                return [tick for tick in found if tick.end_timestamp is not None]
        return []

    def has_tick_beside() -> bool:
        """Return whether a tick has begun and ended during a tick of the silent source."""
        return any(
            slow.timestamp < tick.timestamp and (tick.end_timestamp or 0) < slow.end_timestamp
            for slow in ticks("silent_lag")
            if slow.end_timestamp is not None
            for tick in ticks(f"{NAME}_merges")
        )

    with socket.create_server(("127.0.0.1", 0)) as server:
        code = SILENT.format(port=server.getsockname()[1], lake=orchestrated.lake.uri)
        with running_daemon(orchestrated, tmp_path, code):
            wait_until(lambda: len(ticks("silent_lag")) >= 2, "two ticks", limit_seconds=SECONDS)
            wait_until(has_tick_beside, "a tick beside them", limit_seconds=60)
