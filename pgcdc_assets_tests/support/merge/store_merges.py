"""A process that merges tables of an S3 store by an embedded Spark session of its own.

The session of the other tests has no jars of S3. The tests write commands to the standard input and
read answers from the standard output, both as lines of JSON. See `StoreMerges`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pgcdc_assets.lsn import LsnWindow
    from pgcdc_assets.raw.zone import RawZone

# S3A's least timeout.
SOCKET_TIMEOUT = "15s"
_MARK = "answer: "


class StoreMerges:
    """The client of the process, which has the environment of the test."""

    def __init__(self, zone: RawZone) -> None:
        program = "pgcdc_assets_tests.support.merge.store_merges"
        options = json.dumps(dict(zone.lake.storage_options))
        self._process = subprocess.Popen(
            [sys.executable, "-m", program, zone.lake.uri, zone.name, options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.communicate("")

    def merge(self, race: str, through: LsnWindow) -> str:
        """Merge a table of `races.RACES`; return the error, empty after a success."""
        return str(self._ask("merge", race, through.key))

    def contents(self, race: str) -> list[tuple[Any, ...]]:
        """Return the rows of the compared columns."""
        return [tuple(row) for row in self._ask("contents", race)]

    def maintain(self, race: str) -> None:
        """Compact the table if it needs it, and delete replaced files."""
        self._ask("maintain", race)

    def rebuild(self, race: str) -> str:
        """Rebuild the table from raw; return the error, empty after a success."""
        return str(self._ask("rebuild", race))

    def _ask(self, *words: str) -> Any:
        assert self._process.stdin is not None
        print(json.dumps(words), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_MARK):
                return json.loads(line.removeprefix(_MARK))
        raise AssertionError(f"the process ended with status {self._process.wait()}")


def _serve(uri: str, name: str, options: str) -> None:
    from pgcdc_assets.errors import PgcdcError
    from pgcdc_assets.lsn import LsnWindow
    from pgcdc_assets.merge import MergeFailure, merge_tables, rebuild_table
    from pgcdc_assets.orchestration.resources import SparkResource
    from pgcdc_assets.raw.lake import Lake
    from pgcdc_assets.raw.zone import RawZone
    from pgcdc_assets.tables.maintenance import maintain_table
    from pgcdc_assets.tables.state import table_path
    from pgcdc_assets_tests.support.merge.races import RACES
    from pgcdc_assets_tests.support.spark import CONF

    lake = Lake(uri, json.loads(options))
    conf = {**CONF, "spark.hadoop.fs.s3a.connection.timeout": SOCKET_TIMEOUT}
    spark = SparkResource(remote="local", spark_config=conf).session(lake)

    def answer(what: str, kind: str, window: str = "") -> Any:
        race, zone = RACES[kind], RawZone(lake, name)
        target = race.target
        path = table_path(lake, name, target.schema, target.table, target.scd[0])
        if what == "contents":
            return race.contents(spark, path)
        if what == "maintain":
            maintain_table(lambda: spark, lake, path, 0.0)
            return None
        if what == "rebuild":
            try:
                rebuild_table(spark, zone, target, target.scd[0])
            except PgcdcError as error:
                return f"{type(error).__name__}: {error}"
            return ""
        (report,) = merge_tables(spark, zone, [target], LsnWindow.parse(window))
        if isinstance(report, MergeFailure):
            return f"{type(report.error).__name__}: {report.error}"
        return ""

    print(_MARK + json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(_MARK + json.dumps(answer(*json.loads(line))), flush=True)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
