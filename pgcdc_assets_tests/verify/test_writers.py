"""While writers commit, source and table are equal at each LSN of a comparison."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.merge.pipeline import Pipeline
from pgcdc_assets_tests.support.verify.comparison import verify
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]

_STATEMENTS = (
    "insert into t values (nextval('ids'), 'new', random())",
    "update t set v = v || '.', n = random() where id % 50 = (random() * 50)::int",
    "delete from t where id = (select min(id) from t)",
    "update t set id = nextval('ids') where id = (select max(id) from t)",
)


class Writer:
    """Writes small transactions until the end of the block."""

    def __init__(self, database: Database) -> None:
        self.committed = 0
        self._database = database
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        with self._database.connect(autocommit=False) as connection:
            cursor = connection.cursor()
            while not self._stop.is_set():
                cursor.execute(_STATEMENTS[self.committed % len(_STATEMENTS)])
                if self.committed % 11:
                    connection.commit()
                else:
                    connection.rollback()
                self.committed += 1
                # The pause leaves CPU time to the tested processes.
                self._stop.wait(0.005)

    def wait_for(self, count: int) -> None:
        """Wait until the writer has committed or rolled back this number of transactions."""
        wait_until(lambda: self.committed >= count, "writes")

    @contextmanager
    def at_work(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join()


@pytest.mark.sampled
def test_verify_reports_equality_repeatedly_while_writers_continue(pipeline: Pipeline) -> None:
    pipeline.start(
        "create sequence ids start 1000",
        "create table t (id int primary key, v text, n float8)",
        "insert into t select i, 'row ' || i, random() from generate_series(1, 300) i",
    )
    pipeline.sync()
    writer = Writer(pipeline.database)
    with writer.at_work():
        for turn in range(3):
            before = writer.committed
            writer.wait_for(before + 51)
            found = verify(pipeline)
            assert found.is_equal, (turn, found)
            assert writer.committed > before + 50
            if turn % 2:
                pipeline.merge()
    pipeline.sync()
    assert verify(pipeline).is_equal
