"""The tables that a merge of a wide publication does not materialise.

Dagster's storage needs some milliseconds for each materialisation, whether the merge changed the
table or not. If few of hundreds of tables change, these events take longer than the merge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import dagster as dg

from pgcdc_assets.lsn import LsnWindow, Position
from pgcdc_assets.merge import MergeReport
from pgcdc_assets.orchestration.data_versions import read_shown_windows
from pgcdc_assets.orchestration.runs.records import MERGE_PURPOSE, PURPOSE_TAG

# Up to so many SCD tables, a merge materialises its windows for every table.
MOST_TABLES = 50


@dataclass
class IdleTables:
    """The decision for the tables of one run.

    Attributes:
        is_wide: the run was requested by the sensor, for more than `MOST_TABLES` tables. If a
            person selects tables, all of them are materialised.
    """

    instance: dg.DagsterInstance
    keys: Sequence[dg.AssetKey]
    is_wide: bool

    @classmethod
    def of(cls, context: dg.AssetExecutionContext) -> IdleTables:
        """Return the decision for a run."""
        keys = list(context.selected_asset_keys)
        is_sensors = context.run.tags.get(PURPOSE_TAG) == MERGE_PURPOSE
        return cls(context.instance, keys, is_sensors and len(keys) > MOST_TABLES)

    def is_left_out(
        self, key: dg.AssetKey, report: MergeReport, through: LsnWindow, *, is_first: bool
    ) -> bool:
        """Return whether a table is not materialised, because the merge committed nothing to it.

        If an earlier run was killed between its commit and its materialisation, the first merge of
        the next run materialises the table.

        Args:
            is_first: the merge is the first of the run.
        """
        if not self.is_wide or report.has_committed or report.watermark_before is None:
            return False
        if not is_first:
            return True
        shown = self._shown.get(key)
        return shown is not None and shown.end_position >= Position(
            through.epoch, report.watermark_before
        )

    @cached_property
    def _shown(self) -> Mapping[dg.AssetKey, LsnWindow]:
        return read_shown_windows(self.instance, self.keys)
