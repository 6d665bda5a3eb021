"""What the lag sensor records: the slot's lag and health, and where the source tables are.

A tick every few seconds would fill the event log. So lag and a living slot's health are recorded
now and then, and a result that can only change by an event is recorded when it changes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import dagster as dg

from pgcdc_assets.errors import PgcdcError, TableMoved, TransientError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.orchestration.checks.raw import (
    check_source_table,
    evaluate_slot,
    evaluation_of,
    slot_evaluation,
)
from pgcdc_assets.orchestration.checks.source_tables import read_table_places
from pgcdc_assets.orchestration.metadata import lag_metadata
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.postgres.slot_health import SlotHealth, slot_health
from pgcdc_assets.postgres.slots import SlotStatus
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture, CdcTable

EVERY_SECONDS = 30.0

Event = dg.AssetObservation | dg.AssetCheckEvaluation


@dataclass
class LagObservation:
    """What one tick of the sensor records.

    Attributes:
        scds: the SCD assets by table and kind.
        events: for Dagster to record with the tick.
        moved: source tables that are not where their changes came from.
    """

    instance: dg.DagsterInstance
    capture: CdcCapture
    raw: dg.AssetKey
    scds: Mapping[tuple[CdcTable, int], dg.AssetKey]
    events: list[Event] = field(default_factory=list)
    moved: list[TableMoved] = field(default_factory=list)

    def record_unusable_slot(self, health: SlotHealth, error: PgcdcError) -> None:
        """Record at once that the slot is gone or lost: a tick that fails keeps no events."""
        found = evaluate_slot(self.raw, health)._replace(description=str(error))
        for evaluation in self._changed([evaluation_of(found)]):
            self.instance.report_runless_asset_event(evaluation)

    def observe(
        self,
        settings: ConnectionSettings,
        zone: RawZone,
        status: SlotStatus,
        through: Lsn,
        lag_seconds: float,
    ) -> None:
        """Collect what is to be recorded of a living slot and of the source tables.

        Args:
            through: where the raw zone ends.
        """
        newest = self.instance.fetch_observations(self.raw, limit=1).records
        if newest and time.time() - newest[0].timestamp < EVERY_SECONDS:
            return
        metadata = lag_metadata(status, through, lag_seconds)
        try:
            places = read_table_places(settings, zone, self.capture, "sensor")
        except TransientError:
            metadata["moved_tables"] = "unknown"
        else:
            self.moved = [error for error in places.values() if error is not None]
            metadata["moved_tables"] = "; ".join(map(str, self.moved)) or "none"
            self.events += self._changed(self._evaluations(places))
        self.events.append(dg.AssetObservation(self.raw, metadata=metadata))
        self.events.append(slot_evaluation(self.raw, slot_health(status, through)))

    def _evaluations(
        self, places: Mapping[CdcTable, TableMoved | None]
    ) -> list[dg.AssetCheckEvaluation]:
        return [
            evaluation_of(check_source_table(key, places[table]))
            for (table, _), key in self.scds.items()
            if table in places
        ]

    def _changed(
        self, evaluations: Sequence[dg.AssetCheckEvaluation]
    ) -> list[dg.AssetCheckEvaluation]:
        """Return the evaluations that say something else than the newest recorded ones."""
        keys = [evaluation.asset_check_key for evaluation in evaluations]
        storage = self.instance.event_log_storage
        newest = storage.get_latest_asset_check_execution_by_key(keys)
        known: dict[dg.AssetCheckKey, Any] = {
            key: record.evaluation for key, record in newest.items()
        }
        return [e for e in evaluations if not _is_same(e, known.get(e.asset_check_key))]


def _is_same(evaluation: dg.AssetCheckEvaluation, recorded: Any) -> bool:
    """Compare an evaluation with what is recorded; a run that only plans its own has none yet."""
    return (
        isinstance(recorded, dg.AssetCheckEvaluation)
        and recorded.passed == evaluation.passed
        and recorded.description == evaluation.description
    )
