"""Merges while another program compacts, vacuums or rebuilds the same table: all rows are exact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.errors import TransientError
from pgcdc_assets.merge import MergeReport, merge_tables, rebuild_table
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.spark.sql import delta_table
from pgcdc_assets.tables.maintenance import maintain_table
from pgcdc_assets_tests.support.merge.history import Landing
from pgcdc_assets_tests.support.merge.one_table import merge
from pgcdc_assets_tests.support.merge.races import (
    RACES,
    Race,
    during_the_write,
    right_before_the_write,
    write_as_asked,
)

pytestmark = pytest.mark.spark


@pytest.fixture(autouse=True)
def as_asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    write_as_asked(request.node.callspec.params["race"], monkeypatch)


def _purge(spark: SparkSession, landing: Landing, race: Race, path: str) -> None:
    spark.sql(f"REORG TABLE {delta_table(path)} APPLY (PURGE)")


def _vacuum(spark: SparkSession, landing: Landing, race: Race, path: str) -> None:
    session = spark.newSession()
    session.conf.set("spark.databricks.delta.retentionDurationCheck.enabled", "false")
    session.conf.set("spark.databricks.delta.vacuum.retentionWindowIgnore.enabled", "false")
    session.sql(f"OPTIMIZE {delta_table(path)}")
    session.sql(f"VACUUM {delta_table(path)} RETAIN 0 HOURS")


def _maintain(spark: SparkSession, landing: Landing, race: Race, path: str) -> None:
    maintain_table(lambda: spark, landing.zone.lake, path, 0.0)


def _rebuild(spark: SparkSession, landing: Landing, race: Race, path: str) -> None:
    (scd,) = race.target.scd
    rebuild_table(spark, landing.zone, race.target, scd, landing.windows[0].end)


_ACTS = {"purge": _purge, "vacuum": _vacuum, "maintain": _maintain, "rebuild": _rebuild}
_each_act = pytest.mark.parametrize("act", _ACTS.values(), ids=_ACTS)
_KINDS = "current_image", "history", "bag"
_each_race = pytest.mark.parametrize("race", [RACES[name] for name in _KINDS], ids=_KINDS)
_Act = Callable[[SparkSession, Landing, Race, str], None]


def _begin(spark: SparkSession, zone: RawZone, race: Race) -> tuple[Landing, str]:
    """Merge two windows, so that the table has several files, and land the last changes."""
    landing = race.land_snapshot(zone)
    merge(spark, landing, race.target)
    landing.land(race.first)
    path = merge(spark, landing, race.target).path
    landing.land(race.second)
    return landing, path


def _merge_once(spark: SparkSession, landing: Landing, race: Race) -> bool:
    (report,) = merge_tables(spark, landing.zone, [race.target], landing.windows[-1])
    if isinstance(report, MergeReport):
        return True
    assert isinstance(report.error, TransientError), report.error.__cause__ or report.error
    return False


def _merge_until_done(spark: SparkSession, landing: Landing, race: Race) -> None:
    assert any(_merge_once(spark, landing, race) for _ in range(3))


@pytest.mark.sampled
@_each_race
@_each_act
def test_a_table_is_exact_after_another_writer_before_the_write(
    spark: SparkSession, zone: RawZone, race: Race, act: _Act
) -> None:
    landing, path = _begin(spark, zone, race)
    with right_before_the_write(spark, lambda: act(spark, landing, race, path)):
        _merge_until_done(spark, landing, race)
    _merge_until_done(spark, landing, race)
    assert race.contents(spark, path) == race.outcome


@pytest.mark.soak
@_each_race
@_each_act
def test_a_table_is_exact_after_another_writer_during_the_write(
    spark: SparkSession, zone: RawZone, tmp_path: Path, race: Race, act: _Act
) -> None:
    landing, path = _begin(spark, zone, race)
    with during_the_write(spark, tmp_path, lambda: act(spark, landing, race, path)):
        _merge_once(spark, landing, race)
    _merge_until_done(spark, landing, race)
    assert race.contents(spark, path) == race.outcome
