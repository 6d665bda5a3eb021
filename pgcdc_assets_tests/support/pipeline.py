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
