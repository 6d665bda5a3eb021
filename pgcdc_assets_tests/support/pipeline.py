"""A pipeline of its own for each test: a fresh database, an empty lake, the shared session."""

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
    """From a real Postgres to SCD1 tables."""
    from pgcdc_assets_tests.support.merge.pipeline import Pipeline

    return Pipeline(database, zone, spark)
