"""The invariants of SCD tables, which hold after every merge.

`check_merged` checks the rows that a merge changed; its cost depends on the number of changes.
`check_all` checks the whole table. In SCD1, every key is unique. In SCD2, the versions of a key do
not overlap (`history_rules.py`), every end has a cause (`unexplained_ends.py`), and for a table of
both kinds the current versions equal the rows of SCD1 (`scd1_vs_scd2.py`). In every table, rows
that are older than an added column have its default (`added_defaults.py`).

If a rule cannot be checked, the result has the reason. All queries of a check read the same version
of a table, so merges may run at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pgcdc_assets.errors import PgcdcError, TransientError
from pgcdc_assets.lsn import Lsn, Position
from pgcdc_assets.raw.epochs import Epoch
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.spark.tuning import SMALL_BYTES, tune
from pgcdc_assets.table_name import TableName
from pgcdc_assets.tables.columns import DELETED, EPOCH_COLUMNS
from pgcdc_assets.tables.state import table_path
from pgcdc_assets.verify.added_defaults import count_missing, find_added_columns
from pgcdc_assets.verify.findings import Findings, Rule
from pgcdc_assets.verify.history_rules import HistoryRules, ended_after_sql
from pgcdc_assets.verify.image_rules import count_duplicates, count_small_duplicates
from pgcdc_assets.verify.merge_key import MergeKey
from pgcdc_assets.verify.scd1_vs_scd2 import PairComparison, find_pair
from pgcdc_assets.verify.table_version import TableVersion, read_pinned, read_table_version
from pgcdc_assets.verify.unexplained_ends import find_explainable_ends, read_leaving_changes

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_UNORDERED = "an epoch begins at a lower LSN than the end of the previous epoch"


def check_merged(
    session: SparkSession,
    zone: RawZone,
    table: CdcTable,
    scd: int,
    since: Position | None,
    *,
    whole_below_bytes: int = SMALL_BYTES,
) -> Findings:
    """Check the rows that a merge of an SCD table changed.

    Args:
        session: a session for this call only, with the time zone UTC.
        table: the table with all its kinds of SCD table.
        since: epoch and watermark before the merge; None: all rows are checked.
        whole_below_bytes: check all rows of a table up to this size.

    Raises:
        ConfigurationError: the table was never merged.
        TransientError: Spark could not read the table.
    """
    return _Check(session, zone, table, scd, since, whole_below_bytes).run()


def check_all(session: SparkSession, zone: RawZone, table: CdcTable, scd: int) -> Findings:
    """Check the whole of an SCD table.

    Args:
        session: a session for this call only, with the time zone UTC.
        table: the table with all its kinds of SCD table.

    Raises:
        ConfigurationError: the table was never merged.
        TransientError: Spark could not read the table.
    """
    return _Check(session, zone, table, scd, None, SMALL_BYTES, goes_back=True).run()


@dataclass
class _Check:
    session: SparkSession
    zone: RawZone
    table: CdcTable
    scd: int
    since: Position | None
    whole_below_bytes: int
    goes_back: bool = False
    row_count: int = 0
    violations: dict[Rule, int] = field(default_factory=dict)
    not_judged: dict[Rule, str] = field(default_factory=dict)

    def run(self) -> Findings:
        started = time.monotonic()
        name = self.table.qualified_name
        with _explained(name):
            path = table_path(self.zone.lake, self.zone.name, *self._name, self.scd)
            epochs = self.zone.epochs.all()
            pinned = read_table_version(self.zone, path, name, epochs)
            begin = None
            if pinned.key:
                begin = self._begin(pinned, epochs)
                if self.scd == 1:
                    self._check_image(pinned, begin)
                else:
                    self._check_history(pinned, begin, epochs)
            self._check_defaults(pinned, epochs)
        return Findings(
            *self._name,
            self.scd,
            has_key=bool(pinned.key),
            since=begin,
            row_count=self.row_count,
            violations=self.violations,
            not_judged=self.not_judged,
            seconds=time.monotonic() - started,
        )

    @property
    def _name(self) -> TableName:
        return self.table.name

    def _begin(self, pinned: TableVersion, epochs: Sequence[Epoch]) -> Lsn | None:
        """Return the LSN from which rows are checked; None: all rows are checked."""
        return None if self._is_small(pinned) else self._touched_from(pinned, epochs)

    def _is_small(self, *tables: TableVersion) -> bool:
        return all(pinned.size_bytes <= self.whole_below_bytes for pinned in tables)

    def _touched_from(self, pinned: TableVersion, epochs: Sequence[Epoch]) -> Lsn | None:
        """Return the lowest LSN of the changed rows; None if no LSN is a lower bound."""
        if self.since is None or pinned.watermark is None:
            return None
        epoch, lsn = self.since
        return lsn if pinned.watermark.epoch == epoch or pinned.is_ordered(epochs) else None

    def _check_image(self, pinned: TableVersion, begin: Lsn | None) -> None:
        has_keyless = pinned.key_since is not None and DELETED in pinned.columns
        found = None
        if self._is_small(pinned) and not has_keyless:
            found = count_small_duplicates(self.zone, pinned)
        if found is None:
            rows = self._read(pinned)
            key = MergeKey(pinned.key, dict(rows.dtypes))
            if has_keyless:
                rows = rows.where(f"NOT ({DELETED} AND ({key.lacks_value()}))")
            found = count_duplicates(self.session, rows, key, begin)
        self.row_count, self.violations[Rule.DUPLICATE_KEYS] = found

    def _read(self, pinned: TableVersion) -> DataFrame:
        tune(self.session, 0, pinned.size_bytes)
        return read_pinned(self.session, pinned, is_small=self._is_small(pinned))

    def _check_history(
        self, pinned: TableVersion, begin: Lsn | None, epochs: Sequence[Epoch]
    ) -> None:
        rows = self._read(pinned)
        if pinned.key_since is not None:
            rows = rows.where(ended_after_sql(pinned.key_since))
        key = MergeKey(pinned.key, dict(rows.dtypes))
        is_ordered = pinned.is_ordered(epochs)
        touched_from = self._touched_from(pinned, epochs)
        while True:
            judged = find_explainable_ends(self.zone, self._name, pinned, epochs, touched_from)
            leaving = read_leaving_changes(self.session, self.zone, judged)
            condition = judged.condition_sql("to_lsn")
            rules = HistoryRules(self.session, rows, key, begin, condition, leaving)
            counts = rules.count()
            # Retention may have removed changes during the check.
            if not counts.unexplained or judged == find_explainable_ends(
                self.zone, self._name, pinned, epochs, touched_from
            ):
                break
        self.row_count = counts.row_count
        self.violations[Rule.SEVERAL_CURRENT] = counts.several_current
        self.violations[Rule.WRONG_FLAG] = counts.wrong_flag
        by_order = {Rule.OVERLAPPING: counts.overlapping, Rule.REVERSED: counts.reversed}
        if is_ordered or set(EPOCH_COLUMNS) <= set(pinned.columns):
            self.violations.update(by_order)
        else:
            self.not_judged.update(dict.fromkeys(by_order, _UNORDERED))
        if is_ordered:
            self.violations[Rule.UNEXPLAINED_ENDS] = counts.unexplained
        else:
            self.not_judged[Rule.UNEXPLAINED_ENDS] = _UNORDERED
        if 1 in self.table.scd:
            self._compare_kinds(pinned, epochs, touched_from, is_ordered)

    def _check_defaults(self, pinned: TableVersion, epochs: Sequence[Epoch]) -> None:
        """Count the rows that lack the default of an added column."""
        touched_from = None if self._is_small(pinned) else self._touched_from(pinned, epochs)
        added = find_added_columns(self.zone, self.table, self.scd, pinned, touched_from)
        if not added:
            return
        if not (pinned.is_ordered(epochs) or set(EPOCH_COLUMNS) <= set(pinned.columns)):
            self.not_judged[Rule.MISSING_DEFAULTS] = _UNORDERED
            return
        rows = self._read(pinned)
        newest = next(e for e in epochs if pinned.watermark and e.epoch == pinned.watermark.epoch)
        self.violations[Rule.MISSING_DEFAULTS] = count_missing(
            rows, added, newest, self.table, self.scd, pinned
        )

    def _compare_kinds(
        self,
        history: TableVersion,
        epochs: Sequence[Epoch],
        touched_from: Lsn | None,
        is_ordered: bool,
    ) -> None:
        pair = find_pair(self.zone, self.table, history, epochs, goes_back=self.goes_back)
        if isinstance(pair, str):
            self.not_judged.update(dict.fromkeys((Rule.NOT_IN_SCD1, Rule.ROW_COUNTS), pair))
            return
        is_small = self._is_small(pair.image, pair.history)
        comparing = PairComparison(self.session, pair, is_small)
        self.violations[Rule.ROW_COUNTS] = comparing.count_difference()
        if is_small:
            touched_from = None
        elif touched_from is not None and not is_ordered:
            # Rows of SCD1 from the newer epoch may have lower LSNs.
            self.not_judged[Rule.NOT_IN_SCD1] = _UNORDERED
            return
        self.violations[Rule.NOT_IN_SCD1] = comparing.count_missing(touched_from)


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Raise an error without the message of Spark's error, which may quote values of rows."""
    try:
        yield
    except PgcdcError:
        raise
    except Exception as error:
        # Import late: a check of a small table needs no Spark.
        from pgcdc_assets.spark.errors import describe_failure

        raise TransientError(
            reason=f"The invariants of table {name} were not checked: "
            f"{describe_failure(error)}. Run the check again."
        ) from error
