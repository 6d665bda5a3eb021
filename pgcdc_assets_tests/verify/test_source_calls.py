"""The end of the statements on the source after an interrupt."""

from __future__ import annotations

import threading
import time

import pytest

from pgcdc_assets.postgres.copy.digests import SourceTable, open_source_table
from pgcdc_assets.table_name import TableName
from pgcdc_assets.verify.source_calls import SourceCalls
from pgcdc_assets_tests.support.merge.pipeline import PUBLICATION, Pipeline
from pgcdc_assets_tests.support.verify.comparison import moment_of

pytestmark = [pytest.mark.postgres, pytest.mark.spark]


@pytest.mark.sampled
def test_an_interrupt_between_two_statements_ends_the_call(pipeline: Pipeline) -> None:
    """The server has no statement to cancel at this moment, and the next one may take hours."""
    pipeline.start("create table t (id int primary key)")
    settings, is_between = pipeline.database.settings(), threading.Event()

    def call(source: SourceTable) -> None:
        with source.connection.cursor() as cursor:
            cursor.execute("select 1")
            is_between.set()
            time.sleep(2)
            cursor.execute("select pg_sleep(60)")

    with moment_of(pipeline) as moment:
        began = time.monotonic()
        with (
            pytest.raises(KeyboardInterrupt),
            open_source_table(
                settings, PUBLICATION, TableName("public", "t"), moment.snapshot_name
            ) as source,
            SourceCalls() as calls,
        ):
            calls.add(source)
            calls.submit(lambda: call(source))
            assert is_between.wait(30)
            raise KeyboardInterrupt
        assert time.monotonic() - began < 30
