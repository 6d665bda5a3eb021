"""A pipeline for each test: a new database, an empty lake, the shared Spark session."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pgcdc_assets.raw.zone import RawZone
    from pgcdc_assets_tests.support.database import Database
    from pgcdc_assets_tests.support.merge.pipeline import Pipeline


@pytest.fixture
def pipeline(database: Database, zone: RawZone, spark: SparkSession) -> Pipeline:
    """A pipeline from a real Postgres to SCD1 tables."""
    from pgcdc_assets_tests.support.merge.pipeline import Pipeline

    return Pipeline(database, zone, spark)


class Killed(Exception):
    """The end of a merge at a failpoint."""


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list for names of failpoints. A merge ends at the first of them when it reaches it."""
    from pgcdc_assets import failpoints

    names: list[str] = []

    def die(name: str) -> None:
        if names and names[0] == name:
            names.pop(0)
            raise Killed

    monkeypatch.setattr(failpoints, "reach", die)
    return names
