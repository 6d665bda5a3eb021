"""Registration of the tables that a run has merged in the catalog of the settings.

A failure is a warning of the run: the merge is committed, and readers by path see it. The check
`registered` fails until the entry is there.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import dagster as dg

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.merge import MergeReport
from pgcdc_assets.settings.catalog import CatalogPolicy
from pgcdc_assets.spark.catalog import CatalogTable, register_tables

if TYPE_CHECKING:
    from pgcdc_assets.spark.session import SparkSession

# A run that continues asks the catalog at this interval, and at once for a table that is new to it.
_SECONDS_BETWEEN_QUERIES = 60.0


@dataclass
class Registration:
    """The registrations of one run.

    Attributes:
        policy: None: no table is registered.
    """

    policy: CatalogPolicy | None
    session: SparkSession
    log: dg.DagsterLogManager
    _merged: dict[CatalogTable, None] = field(default_factory=dict)
    _known: set[CatalogTable] = field(default_factory=set)
    _warned: set[str] = field(default_factory=set)
    _asked_at: float = float("-inf")

    def add(self, report: MergeReport) -> None:
        """Add a merged table. A table without a merge in its epoch may not exist."""
        if self.policy is not None and (
            report.has_committed or report.watermark_before is not None
        ):
            self._merged[CatalogTable(report.name, report.scd, report.path)] = None

    def register(self) -> None:
        """Register the tables that were merged so far."""
        is_new = not self._merged.keys() <= self._known
        is_due = time.monotonic() - self._asked_at > _SECONDS_BETWEEN_QUERIES
        if self.policy is None or not self._merged or not (is_new or is_due):
            return
        self._asked_at = time.monotonic()
        try:
            found = register_tables(self.session, self.policy, self._merged, self._known)
            for table, error in found:
                self._known.add(table)
                if error is not None:
                    self._warn(error)
        except ConfigurationError as error:
            self._known |= self._merged.keys()
            self._warn(error)

    def _warn(self, error: ConfigurationError) -> None:
        if str(error) not in self._warned:
            self._warned.add(str(error))
            self.log.warning(str(error))
