"""Merges of small tables with the settings that sessions of users have for larger tables."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets_tests.support.merge.small_tables import merge_by_spark

# Defaults of Spark, which the sessions of tests override.
OF_USERS = {
    "spark.sql.adaptive.enabled": "true",
    "spark.sql.codegen.wholeStage": "true",
    "spark.sql.codegen.factoryMode": "FALLBACK",
}


def merge_as_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge small tables by a MERGE with adaptive planning and code generation."""

    def set_settings(session: SparkSession, *sizes: int) -> None:
        for name, value in OF_USERS.items():
            session.conf.set(name, value)

    merge_by_spark(monkeypatch)
    monkeypatch.setattr("pgcdc_assets.merge.run.tune", set_settings)
    monkeypatch.setattr("pgcdc_assets.merge.kinds.current_image.is_tiny", lambda *_: False)
