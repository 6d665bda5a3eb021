"""The predicate of a partial snapshot, which a command shares with the run that it executes.

A predicate may contain values of rows. Configuration and tags of a run are stored by Dagster and
shown in its UI, so the predicate is in neither: `pgcdc resnapshot` executes the run in its own
process, and the predicate is in a ContextVar of the process. The run has a tag that says that there
is a predicate. If such a run is executed again from the UI, it fails.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field

from pgcdc_assets.capture.snapshots.partial import PartialSnapshot
from pgcdc_assets.capture.snapshots.pool import SnapshotReport
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets.tables.state import read_scd_state, table_path


@dataclass
class PartialRequest:
    """A partial snapshot that a command has asked for.

    Attributes:
        predicate: not in `repr`.
        report: set by the run.
    """

    table: CdcTable
    predicate: str = field(repr=False)
    report: SnapshotReport | None = None


partial_request: ContextVar[PartialRequest | None] = ContextVar("pgcdc_partial", default=None)


def build_partial_snapshot(
    capture: CdcCapture, settings: ConnectionSettings, zone: RawZone, request: PartialRequest
) -> PartialSnapshot:
    """Build a partial snapshot from the settings of a capture.

    Raises:
        ConfigurationError: the SCD tables have no key.
        TableDamaged: the log of an SCD table cannot be read.
    """
    table = request.table
    partial = PartialSnapshot(
        settings,
        zone,
        capture.slot,
        capture.publication,
        table.name,
        request.predicate,
        has_configured_key=bool(table.key),
        policy=capture.snapshot,
        keeps_partitions=table.keeps_partitions,
    )
    for scd in table.scd:
        path = table_path(zone.lake, zone.name, table.schema, table.table, scd)
        state = read_scd_state(zone.lake, zone.name, path)
        if state is not None and state.is_keyless and not table.key:
            raise partial.refused("it has no key in the lake")
    return partial
