"""Asset checks of the raw zone and the slot.

Two come with each captured window: they read the log and the window's own files. The others ask the
source, run by `<name>_checks`, by a click in the UI, and the slot's health by the lag sensor as
well.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import dagster as dg

from pgcdc_assets.errors import WindowUnavailable
from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.orchestration.names import Names
from pgcdc_assets.orchestration.resources import PostgresResource
from pgcdc_assets.orchestration.settings import CdcCapture
from pgcdc_assets.postgres.catalog import published_relations
from pgcdc_assets.postgres.slots import SlotStatus, read_slot_status
from pgcdc_assets.raw.changes import Recount
from pgcdc_assets.raw.summary import WindowSummary
from pgcdc_assets.raw.zone import RawZone

WITHOUT_GAPS = "windows_without_gaps"
COUNTED_AS_DECODED = "rows_as_decoded"
SLOT_HEALTH = "slot_health"
REPLICA_IDENTITY = "replica_identity"

_MISSING = "not there"


def check_windows(
    zone: RawZone, raw: dg.AssetKey, recounts: Sequence[Recount]
) -> list[dg.AssetCheckResult]:
    """Check the windows just captured, and that they continue what was there before."""
    first, last = recounts[0].decoded.window, recounts[-1].decoded.window
    landed = [summary.window for summary in zone.changes.windows(first.epoch, first.start)]
    holes = [
        f"{before.end} to {after.start}"
        for before, after in pairwise(landed)
        if before.end != after.start
    ]
    return [
        dg.AssetCheckResult(
            asset_key=raw,
            check_name=WITHOUT_GAPS,
            passed=not holes,
            metadata={
                "epoch": first.epoch,
                "start_lsn": str(first.start),
                "end_lsn": str(last.end),
                "holes": ", ".join(holes) or "none",
            },
        ),
        _check_counts(raw, recounts),
    ]


def _check_counts(raw: dg.AssetKey, recounts: Sequence[Recount]) -> dg.AssetCheckResult:
    """Compare the rows of each window with what was decoded, by table and operation."""
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
    if wrong:
        metadata["reason"] = (
            f"the raw zone holds {wrong[0].found.row_count} of the "
            f"{wrong[0].decoded.row_count} rows landed"
        )
    return dg.AssetCheckResult(
        asset_key=raw, check_name=COUNTED_AS_DECODED, passed=not wrong, metadata=metadata
    )


def _rows_by_operation(summaries: Iterable[WindowSummary]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for summary in summaries:
        for operations in summary.counts.values():
            counts.update(operations)
    return counts


def rows_missing(raw: dg.AssetKey, error: WindowUnavailable) -> dg.AssetCheckResult:
    """Judge a window whose rows cannot be counted."""
    return dg.AssetCheckResult(
        asset_key=raw,
        check_name=COUNTED_AS_DECODED,
        passed=False,
        metadata={"window": error.facts["window"], "reason": error.facts["reason"]},
    )


def build_source_checks(
    capture: CdcCapture, raw: dg.AssetKey, snapshot: dg.AssetKey
) -> dg.AssetChecksDefinition:
    """Build the checks that ask the source: the slot, and each table's replica identity."""
    names = Names.of(capture)

    @dg.multi_asset_check(
        name=f"{capture.name}_source_checks",
        specs=[
            dg.AssetCheckSpec(
                SLOT_HEALTH,
                asset=raw,
                description="The slot exists, and the server still keeps the WAL that it needs.",
            ),
            dg.AssetCheckSpec(
                REPLICA_IDENTITY,
                asset=snapshot,
                description="Every table's updates and deletes say which row they mean.",
            ),
        ],
        can_subset=True,
        required_resource_keys={names.postgres},
    )
    def source_checks(context: dg.AssetCheckExecutionContext) -> Any:
        postgres: PostgresResource = getattr(context.resources, names.postgres)
        wanted = {key.name for key in context.selected_asset_check_keys}
        with postgres.query_connection("check") as conn:
            if SLOT_HEALTH in wanted:
                yield check_slot(raw, read_slot_status(conn, capture.slot))
            if REPLICA_IDENTITY in wanted:
                found = {
                    relation.qualified_name: relation.replica_identity
                    for relation in published_relations(conn, capture.publication)
                    if relation.primary_key or relation.replica_identity != "d"
                }
                yield check_identities(capture, snapshot, found)

    return source_checks


def check_slot(raw: dg.AssetKey, status: SlotStatus | None) -> dg.AssetCheckResult:
    """Judge the slot: lost is an error; unreserved is a warning, since capturing mends it."""
    state = _MISSING if status is None else status.wal_status or "unknown"
    metadata: dict[str, Any] = {"wal_status": state}
    if status is not None:
        metadata["retained_bytes"] = float(status.retained_bytes or 0)
        if status.safe_wal_size is not None:
            metadata["safe_wal_size"] = float(status.safe_wal_size)
    return dg.AssetCheckResult(
        asset_key=raw,
        check_name=SLOT_HEALTH,
        passed=state in ("reserved", "extended"),
        severity=dg.AssetCheckSeverity.WARN
        if state == "unreserved"
        else dg.AssetCheckSeverity.ERROR,
        metadata=metadata,
    )


def slot_evaluation(raw: dg.AssetKey, status: SlotStatus | None) -> dg.AssetCheckEvaluation:
    """Judge the slot outside a run, as the lag sensor does."""
    return evaluation_of(check_slot(raw, status))


def evaluation_of(
    result: dg.AssetCheckResult, window: LsnWindow | None = None
) -> dg.AssetCheckEvaluation:
    """Turn a result into the event, for where Dagster does not: a step gives one result a check.

    Args:
        window: what was evaluated. A check's history has one entry for each run and partition, at
            the time at which the entry was made: without a partition, a later evaluation of the run
            replaces the entry, and leaves it at the earlier time.
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


def check_identities(
    capture: CdcCapture, snapshot: dg.AssetKey, usable: dict[str, str]
) -> dg.AssetCheckResult:
    """Name the declared tables whose updates and deletes Postgres would refuse or not describe."""
    bad = [
        table.qualified_name
        for table in capture.tables
        if usable.get(table.qualified_name, "n") == "n"
    ]
    return dg.AssetCheckResult(
        asset_key=snapshot,
        check_name=REPLICA_IDENTITY,
        passed=not bad,
        metadata={"tables": ", ".join(bad) or "none", "table_count": len(capture.tables)},
    )
