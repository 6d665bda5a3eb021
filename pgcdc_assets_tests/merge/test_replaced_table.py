"""The commit of a rebuild in an S3 store, without Spark, with answers that are lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.transaction import AddAction

from pgcdc_assets.errors import TransientError
from pgcdc_assets.lsn import Lsn, Position
from pgcdc_assets.merge import replaced_table
from pgcdc_assets.merge.replaced_table import ReplacedTable, replace_files
from pgcdc_assets.raw.delta.files import filesystem
from pgcdc_assets.raw.delta.log_entries import read_commit
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.table_files import move_files
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.tables.owned_columns import NOTHING_OWNED
from pgcdc_assets_tests.support.object_store import StoreProxy
from pgcdc_assets_tests.support.object_store_proxy import Fault

_POSITION = Position(1, Lsn(0x2000))


class Tables:
    """A live table with rows 1 and 2, and a staged table with rows 3, whose file is moved."""

    def __init__(self, lake: Lake) -> None:
        self.zone = RawZone(lake, "test")
        self.live = lake.path("test", "scd1", "t")
        staged = lake.path("test", "rebuild", "t")
        for path, row in ((self.live, 1), (self.live, 2), (staged, 3)):
            self._append(path, row)
        self.staged = self._open(staged)
        actions = pa.table(self.staged.get_add_actions()).to_pylist()
        self.added = [
            AddAction(each["path"], each["size_bytes"], {}, 0, True, '{"numRecords": 1}')
            for each in actions
        ]
        move_files(self.zone, {each.path: each.size for each in self.added}, staged, self.live)

    def replace(self) -> None:
        """Replace the live table."""
        replaced = ReplacedTable(self.live, None, {}, ("id",), NOTHING_OWNED)
        replace_files(self.zone, self.staged, replaced, self.added, _POSITION, ())

    def append(self, row: int) -> None:
        """Commit as another writer."""
        self._append(self.live, row)

    def rows(self) -> Sequence[int]:
        """Return the rows as delta-rs reads them."""
        found = self._open(self.live).to_pyarrow_table().column("id").to_pylist()
        return sorted(found)

    def commits(self) -> list[dict[str, Any]]:
        """Return the added and removed paths of each version, and check that none is both."""
        files = filesystem(self.zone.lake, self.live)
        commits = []
        for version in range(self._open(self.live).version() + 1):
            found = read_commit(files, version)
            paths = {
                kind: [each[kind]["path"] for each in found if kind in each]
                for kind in ("add", "remove")
            }
            assert set(paths["add"]).isdisjoint(paths["remove"]), version
            commits.append(paths)
        return commits

    def _append(self, path: str, row: int) -> None:
        rows = pa.table({"id": pa.array([row], pa.int32())})
        write_deltalake(path, rows, mode="append", storage_options=self.zone.lake.delta_options)

    def _open(self, path: str) -> DeltaTable:
        return DeltaTable(path, storage_options=self.zone.lake.delta_options)


@pytest.fixture
def tables(s3_lake: Lake) -> Tables:
    return Tables(Lake(s3_lake.uri, {"timeout": "5s", "retry_timeout": "10s"}))


def _at_commit(what: str) -> Fault:
    return Fault(what, "PUT", "scd1/t/_delta_log/0", is_conditional=True, times=1)


@pytest.mark.parametrize("what", ["SlowDown after", "cut after"])
def test_a_commit_whose_answer_is_lost_is_not_repeated(
    what: str, tables: Tables, store_proxy: StoreProxy
) -> None:
    """A repetition would add and remove the same files, and Spark would read no rows."""
    with store_proxy.making(_at_commit(what)):
        tables.replace()
    assert store_proxy.faults() == {what: 1}
    assert tables.rows() == [3]
    *_, last = tables.commits()
    assert (len(tables.commits()), len(last["add"]), len(last["remove"])) == (3, 1, 2)


def test_a_commit_that_another_writer_has_followed_is_not_repeated(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of an earlier attempt are in the table, whatever its log says."""
    monkeypatch.setattr(replaced_table, "is_written", lambda *_: False)
    tables.replace()
    tables.append(4)
    tables.replace()
    assert tables.rows() == [3, 4]
    assert len(tables.commits()) == 4


def test_the_rows_of_another_writer_are_replaced_by_the_next_attempt(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, waiting = replaced_table.open_again, [4, 5]

    def open_again(zone: RawZone, path: str) -> DeltaTable:
        found = real(zone, path)
        if waiting:
            tables.append(waiting.pop())
        return found

    monkeypatch.setattr(replaced_table, "open_again", open_again)
    tables.replace()
    assert tables.rows() == [3]
    assert len(tables.commits()) == 5


@pytest.mark.parametrize("what", ["SlowDown", "cut"])
def test_a_commit_that_the_store_does_not_apply_is_an_error(
    what: str, tables: Tables, store_proxy: StoreProxy
) -> None:
    fault = _at_commit(what)
    fault.times = 1_000_000
    with store_proxy.making(fault), pytest.raises(TransientError):
        tables.replace()
    assert tables.rows() == [1, 2]
    tables.replace()
    assert tables.rows() == [3]
