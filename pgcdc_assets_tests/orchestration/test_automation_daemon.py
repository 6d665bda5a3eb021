"""`on_new_merges` under a real daemon, as in docs/guides/deploy.md."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import dagster as dg
import pytest

from pgcdc_assets.orchestration.data_versions import find_shown_through
from pgcdc_assets.tables.state import table_path
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated
from pgcdc_assets_tests.support.orchestration.daemon import SECONDS, running_daemon
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.soak]

A, B = (dg.AssetKey([NAME, "scd1", "public", table]) for table in "ab")

# The asset writes the number of rows at each materialization.
MART = """
import pyarrow as pa
from deltalake import DeltaTable


@dg.asset(
    deps=[dg.AssetKey([{name!r}, "scd1", "public", "a"])], automation_condition=on_new_merges()
)
def mart() -> None:
    rows = pa.RecordBatchReader.from_stream(DeltaTable({path!r}).scan()).read_all().num_rows
    with open({output!r}, "a") as output:
        print(rows, file=output)


defs = dg.Definitions.merge(
    *cdc,
    dg.Definitions(
        assets=[mart],
        sensors=[
            dg.AutomationConditionSensorDefinition(
                "marts",
                target=dg.AssetSelection.assets("mart"),
                default_status=dg.DefaultSensorStatus.RUNNING,
                minimum_interval_seconds=2,
            )
        ],
    ),
)
"""


def test_the_daemon_runs_an_asset_only_after_merges_with_changes_of_its_table(
    orchestrated: Orchestrated, tmp_path: Path
) -> None:
    zone, instance = orchestrated.zone, orchestrated.instance
    output = tmp_path / "mart.txt"
    path = table_path(zone.lake, zone.name, "public", "a", 1)
    code = MART.format(name=NAME, path=path, output=str(output))

    def made() -> list[str]:
        return output.read_text().split() if output.exists() else []

    def shows_another(before: object) -> bool:
        return find_shown_through(instance, B) != before

    with running_daemon(orchestrated, tmp_path, code) as daemon:
        wait_until(lambda: made() == ["10"], "the first contents", limit_seconds=SECONDS)
        for number in range(2):
            before = find_shown_through(instance, B)
            orchestrated.commit(f"insert into b values ({number}, 1)")
            wait_until(
                partial(shows_another, before), "a merge of the other table", limit_seconds=SECONDS
            )
        wait_until(
            lambda: find_shown_through(instance, A) == find_shown_through(instance, B), "both"
        )
        merged_at = time.time()
        wait_until(lambda: daemon.ticks("marts", merged_at) >= 3, "ticks", limit_seconds=60)
        assert made() == ["10"]
        orchestrated.commit("insert into a values (11, 'new')")
        wait_until(lambda: made()[1:], "another run of the asset", limit_seconds=SECONDS)
        assert made() == ["10", "11"]
