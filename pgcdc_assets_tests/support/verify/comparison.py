"""Comparison of a pipeline's table with its source at one LSN, as in `pgcdc verify`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pgcdc_assets.settings import CdcTable
from pgcdc_assets.verify import (
    Comparison,
    ComparisonFailure,
    Moment,
    compare_at,
    compare_tables,
    source_moment,
    wait_captured,
)
from pgcdc_assets_tests.support.merge.pipeline import PUBLICATION, Pipeline


@contextmanager
def moment_of(pipeline: Pipeline) -> Iterator[Moment]:
    """Open a comparison point of the source, and capture nothing."""
    with source_moment(pipeline.database.settings(), pipeline.zone, pipeline.slot) as moment:
        yield moment


def compare(
    pipeline: Pipeline, moment: Moment, table: str = "t", key: tuple[str, ...] | None = None
) -> Comparison:
    """Compare one table at a captured comparison point."""
    wait_captured(pipeline.zone, moment, 0)
    return compare_at(
        pipeline.spark,
        pipeline.database.settings(),
        pipeline.zone,
        PUBLICATION,
        CdcTable("public", table, key=key),
        moment,
    )


def compare_all(pipeline: Pipeline, moment: Moment) -> list[Comparison | ComparisonFailure]:
    """Compare all tables at a captured comparison point."""
    return list(
        compare_tables(
            pipeline.spark,
            pipeline.database.settings(),
            pipeline.zone,
            PUBLICATION,
            [CdcTable("public", table) for table in pipeline.tables],
            moment,
        )
    )


def verify_all(pipeline: Pipeline) -> dict[str, Comparison]:
    """Open a comparison point, capture through it without a merge, and compare all tables.

    Raises:
        PgcdcError: a table was not compared.
    """
    with moment_of(pipeline) as moment:
        pipeline.capture()
        wait_captured(pipeline.zone, moment, 0)
        compared = {}
        for found in compare_all(pipeline, moment):
            if isinstance(found, ComparisonFailure):
                raise found.error
            compared[found.table] = found
        return compared


def verify(pipeline: Pipeline, table: str = "t", key: tuple[str, ...] | None = None) -> Comparison:
    """Open a comparison point, capture through it without a merge, and compare one table."""
    with moment_of(pipeline) as moment:
        pipeline.capture()
        return compare(pipeline, moment, table, key)
