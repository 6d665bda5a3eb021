"""Asset checks of the raw zone and the slot.

Three checks follow each captured window: they read the logs and the window's files. The other
checks query the source. They are part of the job `<name>_checks` and can be run in the UI. The lag
sensor records their results too (`lag_observation.py`, `schema_observation.py`).
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import dagster as dg

from pgcdc_assets.errors import PgcdcError, WindowUnavailable
from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.orchestration.checks.identities import (
    REPLICA_IDENTITY,
    check_identities,
)
from pgcdc_assets.orchestration.checks.remedies import lost_rows, lost_windows, parked_rows
from pgcdc_assets.orchestration.checks.schema_changes import SCHEMA_CHANGES, check_schema_changes
from pgcdc_assets.orchestration.checks.source_tables import read_relation_ids, read_table_places
from pgcdc_assets.orchestration.names import Names, StepKeys
from pgcdc_assets.orchestration.resources import LakeResource, PostgresResource
from pgcdc_assets.orchestration.runs.failures import dagster_failures
from pgcdc_assets.orchestration.state import captured_through, left_tables, read_gates
from pgcdc_assets.postgres.catalog.moved_tables import SourcePlace, find_declared_table
from pgcdc_assets.postgres.catalog.relations import published_tables
from pgcdc_assets.postgres.connection import Connection
from pgcdc_assets.postgres.preflight.replica_identity import are_identities_usable
from pgcdc_assets.postgres.slots.health import SlotHealth, SlotProblem, slot_health
from pgcdc_assets.postgres.slots.status import read_slot_status
from pgcdc_assets.raw.changes import Recount
from pgcdc_assets.raw.relations.schema_events import SchemaChange, open_events
from pgcdc_assets.raw.window_gaps import find_gaps
from pgcdc_assets.raw.windows.summary import WindowSummary
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets.table_name import TableName

WITHOUT_GAPS = "windows_without_gaps"
COUNTED_AS_DECODED = "rows_as_decoded"
NO_PARKED_ROWS = "no_parked_rows"
WINDOW_CHECKS = (WITHOUT_GAPS, COUNTED_AS_DECODED, NO_PARKED_ROWS)
SLOT_HEALTH = "slot_health"
SOURCE_TABLE = "source_table"


def check_windows(
    zone: RawZone,
    raw: dg.AssetKey,
    recounts: Sequence[Recount],
    tables: Collection[TableName] = (),
) -> list[dg.AssetCheckResult]:
    """Check captured windows: no gap after the earlier windows, no missing row, no parked row.

    Args:
        zone: the raw zone.
        raw: the raw asset.
        recounts: the rows of each window, decoded and counted again.
        tables: the declared tables.
    """
    first, last = recounts[0].decoded.window, recounts[-1].decoded.window
    holes = [f"{end} to {start}" for end, start in find_gaps(zone, first)]
    return [
        dg.AssetCheckResult(
            asset_key=raw,
            check_name=WITHOUT_GAPS,
            passed=not holes,
            description=lost_windows(zone.name, holes) if holes else None,
            metadata={
                "epoch": first.epoch,
                "start_lsn": str(first.start),
                "end_lsn": str(last.end),
                "holes": ", ".join(holes) or "none",
            },
        ),
        _check_counts(zone.name, raw, recounts, tables),
        _check_parked_rows(zone, raw, recounts, tables),
    ]


def _check_counts(
    capture: str,
    raw: dg.AssetKey,
    recounts: Sequence[Recount],
    tables: Collection[TableName],
) -> dg.AssetCheckResult:
    """Compare the rows of each window with the decoded rows, by table and operation."""
    wrong = [recount for recount in recounts if not recount.is_complete]
    decoded = _rows_by_operation(recount.decoded for recount in recounts)
    found = _rows_by_operation(recount.found for recount in recounts)
    metadata: dict[str, Any] = {
        "window": (wrong or recounts)[-1].decoded.window.key,
        "row_count": float(sum(found.values())),
        "decoded_row_count": float(sum(decoded.values())),
        "operations": dg.MetadataValue.table(
            [
                dg.TableRecord(
                    {
                        "operation": operation,
                        "decoded": str(decoded[operation]),
                        "found": str(found[operation]),
                    }
                )
                for operation in sorted(decoded | found)
            ],
            schema=dg.TableSchema(
                [dg.TableColumn(name) for name in ("operation", "decoded", "found")]
            ),
        ),
    }
    description = None
    if wrong:
        metadata["reason"] = (
            f"the raw zone holds {wrong[0].found.row_count} of the "
            f"{wrong[0].decoded.row_count} rows landed"
        )
        changed = [name for name in tables if any(map(partial(_differs, name), wrong))]
        description = lost_rows(capture, wrong[0].decoded.window.key, changed)
    return dg.AssetCheckResult(
        asset_key=raw,
        check_name=COUNTED_AS_DECODED,
        passed=not wrong,
        description=description,
        metadata=metadata,
    )


def _differs(table: TableName, recount: Recount) -> bool:
    """Return whether the rows of a table are not those that were decoded."""
    name = table.record_name
    return recount.decoded.counts.get(name, {}) != recount.found.counts.get(name, {})


def _check_parked_rows(
    zone: RawZone,
    raw: dg.AssetKey,
    recounts: Sequence[Recount],
    tables: Collection[TableName],
) -> dg.AssetCheckResult:
    """Check that no declared table waits for a snapshot because of rows that cannot be decoded."""
    in_windows: Counter[str] = Counter()
    for recount in recounts:
        for table, operations in recount.decoded.counts.items():
            in_windows[table] += operations.get("P", 0)
    events = [
        event
        for event in zone.schema_events.read()
        if event.change is SchemaChange.ROW_PARKED and event.table in tables
    ]
    waiting = open_events(events, zone.snapshots.complete_snapshots()) if events else {}
    reasons = [f"{table}: {own[0].detail}" for table, own in sorted(waiting.items())]
    return dg.AssetCheckResult(
        asset_key=raw,
        check_name=NO_PARKED_ROWS,
        passed=not waiting,
        description=parked_rows(zone.name, reasons, waiting) if waiting else None,
        metadata={
            "parked_row_count": float(in_windows.total()),
            "tables": ", ".join(map(str, sorted(waiting))) or "none",
            "reason": "; ".join(reasons) or "none",
        },
    )


def _rows_by_operation(summaries: Iterable[WindowSummary]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for summary in summaries:
        for operations in summary.counts.values():
            counts.update(operations)
    return counts


def rows_missing(capture: str, raw: dg.AssetKey, error: WindowUnavailable) -> dg.AssetCheckResult:
    """Return the failed check of a window whose rows cannot be counted."""
    return dg.AssetCheckResult(
        asset_key=raw,
        check_name=COUNTED_AS_DECODED,
        passed=False,
        description=str(error.in_capture(capture)),
        metadata={"window": error.window, "reason": error.reason},
    )


def build_source_checks(
    capture: CdcCapture,
    raw: dg.AssetKey,
    snapshot: dg.AssetKey,
    scds: Mapping[tuple[CdcTable, int], dg.AssetKey],
) -> dg.AssetsDefinition:
    """Build the checks that query the source: slot, replica identities, tables, schema changes.

    Args:
        scds: the SCD assets by table and kind.
    """
    names = Names.of(capture)
    step = StepKeys(capture.name)
    tables = {key: table for (table, _), key in scds.items()}
    step_keys = [step.key(f"scd{scd}", table, key) for (table, scd), key in scds.items()]

    @dg.multi_asset_check(
        name=names.check_source_step,
        specs=[
            dg.AssetCheckSpec(
                SLOT_HEALTH,
                asset=raw,
                description="The slot exists, and the server still keeps the WAL that it needs.",
            ),
            dg.AssetCheckSpec(
                REPLICA_IDENTITY,
                asset=snapshot,
                description="The updates and deletes of every table identify their row.",
            ),
            *(
                dg.AssetCheckSpec(
                    SOURCE_TABLE,
                    asset=key,
                    description="The source table's changes are captured: it was not dropped or "
                    "taken out of the publication, and no other table has its name.",
                )
                for key in step_keys
            ),
            *(
                dg.AssetCheckSpec(
                    SCHEMA_CHANGES,
                    asset=key,
                    description="No change of the source table's definition waits for a snapshot.",
                )
                for key in step_keys
            ),
        ],
        can_subset=True,
        required_resource_keys={names.postgres, names.lake},
    )
    def source_checks(context: dg.AssetCheckExecutionContext) -> Any:
        with dagster_failures(capture.name):
            postgres: PostgresResource = getattr(context.resources, names.postgres)
            lake: LakeResource = getattr(context.resources, names.lake)
            selected = context.selected_asset_check_keys
            wanted = {key.name for key in selected}
            zone = lake.zone(capture.name)
            left = left_tables(zone, capture)
            with postgres.query_connection("check") as conn:
                if SLOT_HEALTH in wanted:
                    health = _read_slot_health(conn, capture, zone)
                    error = health.error(capture.slot, zone.uri, capture.name)
                    yield evaluate_slot(raw, health, error)
                if REPLICA_IDENTITY in wanted:
                    known = read_relation_ids(zone, capture)
                    published = published_tables(conn, capture.publication)
                    found = {
                        table.qualified_name: find_declared_table(
                            published, table.name, known.get(table.name)
                        )
                        for table in capture.tables
                        if table.name not in left
                    }
                    tables_found = [one for one in found.values() if one is not None]
                    usable = are_identities_usable(conn, capture.publication, tables_found)
                    bad = [
                        name
                        for name, one in found.items()
                        if one is None or not usable[one.relation.relation_id]
                    ]
                    yield check_identities(snapshot, bad, len(found))
            if SOURCE_TABLE in wanted:
                places = read_table_places(postgres.settings(), zone, capture, "check")
                for key in sorted(
                    check.asset_key for check in selected if check.name == SOURCE_TABLE
                ):
                    table = tables[key]
                    yield check_source_table(key, places.get(table), left.get(table.name))
            if SCHEMA_CHANGES in wanted:
                events, gates = zone.schema_events.read(), read_gates(zone, capture)
                for key in sorted(c.asset_key for c in selected if c.name == SCHEMA_CHANGES):
                    name = tables[key].name
                    own = [event for event in events if event.table == name]
                    yield check_schema_changes(capture.name, key, own, gates.get(name))

    return step.restore(source_checks)


def _read_slot_health(conn: Connection, capture: CdcCapture, zone: RawZone) -> SlotHealth:
    """Judge the slot beside a capture that may run.

    A capture lands a window before it confirms the window, so the slot is read first. The position
    of the server is then read again, because a window may have landed in between.
    """
    status, epoch = read_slot_status(conn, capture.slot), zone.epochs.latest()
    if epoch is None:
        return slot_health(status)
    through = captured_through(zone, epoch).lsn
    health = slot_health(status, through)
    if health.problem is SlotProblem.SERVER_BEHIND:
        return slot_health(read_slot_status(conn, capture.slot), through)
    return health


def evaluate_slot(
    raw: dg.AssetKey, health: SlotHealth, error: PgcdcError | None
) -> dg.AssetCheckResult:
    """Check the slot; an unreserved slot is a warning, because a capture can still save it.

    Args:
        error: the problem of the slot, whose sentence describes the result; None: no problem.
    """
    status = health.status
    metadata: dict[str, Any] = {"wal_status": health.wal_status}
    if status is not None:
        metadata["retained_bytes"] = float(status.retained_bytes or 0)
        if status.safe_wal_size is not None:
            metadata["safe_wal_size"] = float(status.safe_wal_size)
    severity, description = dg.AssetCheckSeverity.ERROR, None if error is None else str(error)
    if error is None and health.is_at_risk:
        severity, description = dg.AssetCheckSeverity.WARN, f"{health.risk} {health.risk_remedy}"
    return dg.AssetCheckResult(
        asset_key=raw,
        check_name=SLOT_HEALTH,
        passed=health.is_sound,
        severity=severity,
        description=description,
        metadata=metadata,
    )


def check_source_table(
    key: dg.AssetKey, place: SourcePlace | None, left: str | None = None
) -> dg.AssetCheckResult:
    """Check whether a table's changes are still captured, also under another name.

    Args:
        key: the key of an SCD asset of the table.
        place: the table in the source's catalog; None for a table without a snapshot.
        left: the sentence about a table that left the publication; None if the table did not.
    """
    error = None if place is None else place.error
    description = None if error is None else str(error)
    if left is not None:
        description = f"{left} The asset stays until `exclude` lists the table."
    metadata = {"reason": "none" if error is None else str(error)}
    if place is not None and place.name is not None:
        metadata["source_name"] = str(place.name)
        if place.is_renamed:
            description = f"The table is named {place.name} now. The capture follows its OID."
    if place is not None and place.is_replaced and error is None:
        description = "Another table has the name now. The next snapshot reads the other table."
    return dg.AssetCheckResult(
        asset_key=key,
        check_name=SOURCE_TABLE,
        passed=error is None and left is None,
        severity=dg.AssetCheckSeverity.ERROR if left is None else dg.AssetCheckSeverity.WARN,
        description=description,
        metadata=metadata,
    )


def slot_evaluation(
    raw: dg.AssetKey, health: SlotHealth, error: PgcdcError | None = None
) -> dg.AssetCheckEvaluation:
    """Check the slot outside a run, for the lag sensor."""
    return evaluation_of(evaluate_slot(raw, health, error))


def evaluation_of(
    result: dg.AssetCheckResult, window: LsnWindow | None = None
) -> dg.AssetCheckEvaluation:
    """Return the event of a result, because Dagster accepts one result of a check per step.

    Args:
        window: the window that was checked. A check's history has one entry for each run and
            partition, with the time of the first evaluation. Without a partition, a later
            evaluation of the run would replace the entry and keep the earlier time.
    """
    assert result.asset_key is not None
    assert result.check_name is not None
    return dg.AssetCheckEvaluation(
        asset_key=result.asset_key,
        check_name=result.check_name,
        passed=result.passed,
        metadata=result.metadata,
        severity=result.severity,
        description=result.description,
        partition=window.key if window is not None else None,
    )
