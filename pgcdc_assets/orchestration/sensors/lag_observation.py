"""Events that the lag sensor records: the slot's lag and health, and the present names of tables.

A record at every evaluation would fill the event log. So lag and health of a usable slot are
recorded at an interval, and other results are recorded when they change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import dagster as dg

from pgcdc_assets.errors import PgcdcError, TableMoved, TransientError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.orchestration.checks.raw import (
    check_source_table,
    evaluation_of,
    slot_evaluation,
)
from pgcdc_assets.orchestration.checks.source_tables import read_table_places
from pgcdc_assets.orchestration.metadata import lag_metadata
from pgcdc_assets.orchestration.runs.records import seconds_since
from pgcdc_assets.orchestration.state import left_tables
from pgcdc_assets.postgres.catalog.moved_tables import SourcePlace
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.postgres.slots.health import SlotHealth, slot_health
from pgcdc_assets.postgres.slots.status import SlotStatus
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets.table_name import TableName

EVERY_SECONDS = 30.0

_NEWEST = 10

Event = dg.AssetObservation | dg.AssetCheckEvaluation


@dataclass
class LagObservation:
    """The records of one evaluation of the sensor.

    Attributes:
        scds: the SCD assets by table and kind.
        events: events that Dagster records with the evaluation.
        moved: errors of source tables whose changes are no longer captured.
    """

    instance: dg.DagsterInstance
    capture: CdcCapture
    raw: dg.AssetKey
    scds: Mapping[tuple[CdcTable, int], dg.AssetKey]
    events: list[Event] = field(default_factory=list)
    moved: list[TableMoved] = field(default_factory=list)

    def record_unusable_slot(self, health: SlotHealth, error: PgcdcError) -> None:
        """Record an unusable slot at once, because a failed evaluation loses its events."""
        for evaluation in self._changed([slot_evaluation(self.raw, health, error)]):
            self.instance.report_runless_asset_event(evaluation)

    def observe(
        self,
        settings: ConnectionSettings,
        zone: RawZone,
        status: SlotStatus,
        through: Lsn,
        lag_seconds: float,
    ) -> None:
        """Collect the events about a usable slot and about the source tables.

        Args:
            through: the end of the captured changes.
        """
        if self._is_recorded():
            return
        metadata = lag_metadata(status, through, lag_seconds)
        try:
            places = read_table_places(settings, zone, self.capture, "sensor")
        except TransientError:
            metadata["moved_tables"] = metadata["renamed_tables"] = "unknown"
        else:
            left = left_tables(zone, self.capture)
            self.moved = [
                place.error
                for table, place in places.items()
                if place.error is not None and table.name not in left
            ]
            metadata["moved_tables"] = "; ".join(map(str, self.moved)) or "none"
            renamed = [p for p in places.values() if p.is_renamed]
            names = [f"{place.declared} is named {place.name} now" for place in renamed]
            metadata["renamed_tables"] = "; ".join(names) or "none"
            self.events += self._changed(self._evaluations(places, left))
        self.events.append(dg.AssetObservation(self.raw, metadata=metadata))
        self.events.append(slot_evaluation(self.raw, slot_health(status, through)))

    def _is_recorded(self) -> bool:
        """Return whether the sensor has recorded the lag a short time ago.

        A running capture records observations of the same asset, without `wal_status`.
        """
        newest = self.instance.fetch_observations(self.raw, limit=_NEWEST).records
        ours = (r for r in newest if "wal_status" in _metadata_of(r))
        last = next(ours, None)
        return last is not None and seconds_since(last.timestamp) < EVERY_SECONDS

    def _evaluations(
        self, places: Mapping[CdcTable, SourcePlace], left: Mapping[TableName, str]
    ) -> list[dg.AssetCheckEvaluation]:
        return [
            evaluation_of(check_source_table(key, places[table], left.get(table.name)))
            for (table, _), key in self.scds.items()
            if table in places
        ]

    def _changed(
        self, evaluations: Sequence[dg.AssetCheckEvaluation]
    ) -> list[dg.AssetCheckEvaluation]:
        return changed_evaluations(self.instance, evaluations)


def _metadata_of(record: dg.EventLogRecord) -> Mapping[str, Any]:
    observation = record.asset_observation
    return {} if observation is None else observation.metadata


def changed_evaluations(
    instance: dg.DagsterInstance, evaluations: Sequence[dg.AssetCheckEvaluation]
) -> list[dg.AssetCheckEvaluation]:
    """Return the evaluations that differ from the newest recorded evaluations."""
    keys = [evaluation.asset_check_key for evaluation in evaluations]
    newest = instance.event_log_storage.get_latest_asset_check_execution_by_key(keys)
    known: dict[dg.AssetCheckKey, Any] = {key: record.evaluation for key, record in newest.items()}
    return [e for e in evaluations if not _is_same(e, known.get(e.asset_check_key))]


def _is_same(evaluation: dg.AssetCheckEvaluation, recorded: Any) -> bool:
    """Compare an evaluation with the recorded one. A planned evaluation has no result yet."""
    return (
        isinstance(recorded, dg.AssetCheckEvaluation)
        and recorded.passed == evaluation.passed
        and recorded.description == evaluation.description
    )
