"""The snapshot asset: one table is one partition, and a materialisation re-snapshots the table.

The first run also creates the slot, and reads all tables in the slot's exported snapshot, so that
snapshots and stream meet exactly at the slot's consistent point.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg

from pgcdc_assets.capture.snapshots.pool import SnapshotFailure, SnapshotReport
from pgcdc_assets.capture.snapshots.run import snapshot_each_table
from pgcdc_assets.errors import (
    ConfigurationError,
    MergeConflict,
    rebuild_command,
    resnapshot_remedy,
)
from pgcdc_assets.orchestration.metadata import source_column_schema
from pgcdc_assets.orchestration.names import Names, StepKeys
from pgcdc_assets.orchestration.resources import LakeResource, PostgresResource
from pgcdc_assets.orchestration.runs.applied_snapshots import is_passed, passed_error
from pgcdc_assets.orchestration.runs.claims import claim_run
from pgcdc_assets.orchestration.runs.failures import dagster_failures, raise_failed
from pgcdc_assets.orchestration.runs.partial_request import build_partial_snapshot, partial_request
from pgcdc_assets.orchestration.runs.records import ADOPT_SLOT_TAG, PARTIAL_TAG
from pgcdc_assets.orchestration.state import read_gates, watermarks
from pgcdc_assets.postgres.snapshots.age import SnapshotAge
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets.tables.schema_gate import SchemaGate


def build_snapshot_asset(
    capture: CdcCapture,
    spec: dg.AssetSpec,
    sources: Mapping[CdcTable, dg.AssetKey],
    partitions: dg.PartitionsDefinition[str],
) -> dg.AssetsDefinition:
    """Build the asset that copies tables.

    Args:
        sources: the source tables' keys, which it depends on: what a copy saw of them is observed
            there.
    """
    names = Names.of(capture)
    step = StepKeys(capture.name)
    tables = {table.partition_key: table for table in capture.tables}

    @dg.multi_asset(
        name=names.copy_step,
        # Skippable: a partial snapshot is no materialization of the table's partition.
        specs=[spec.replace_attributes(deps=step.sources(sources), skippable=True)],
        partitions_def=partitions,
        backfill_policy=dg.BackfillPolicy.single_run(),
        pool=names.snapshot_pool,
        required_resource_keys={names.postgres, names.lake},
    )
    def snapshot(context: dg.AssetExecutionContext) -> Any:
        postgres: PostgresResource = getattr(context.resources, names.postgres)
        lake: LakeResource = getattr(context.resources, names.lake)
        failures: list[SnapshotFailure] = []
        metadata = _copied_before(context)
        wanted: list[CdcTable] = [tables[k] for k in context.partition_keys if k not in metadata]
        with claim_run(context), dagster_failures(capture.name):
            zone = lake.zone(capture.name)
            if PARTIAL_TAG in context.run.tags:
                report = _take_partial(context, capture, postgres, zone, wanted)
                seen = partial_metadata(report)
                partition = report.name.partition_key
                context.log_event(dg.AssetObservation(spec.key, partition=partition, metadata=seen))
                return
            merged = [table for table in wanted if watermarks(zone, table)]
            gates = read_gates(zone, capture)
            for table in wanted:
                if table.name in gates:
                    context.log.info(f"{table.qualified_name}: {gates[table.name].reason}")
            outcomes = snapshot_each_table(
                postgres.settings(),
                zone,
                capture.slot,
                capture.publication,
                [table.name for table in wanted],
                adopt_slot=capture.adopt_slot or ADOPT_SLOT_TAG in context.run.tags,
                slot_policy=capture.slot_policy,
                policy=capture.snapshot,
                standby=postgres.standby_settings(capture.snapshot),
                on_progress=lambda progress: context.log.info(str(progress)),
            )
            for outcome in outcomes:
                name = outcome.name
                if isinstance(outcome, SnapshotFailure):
                    context.log.error(f"{name}: {outcome.error}")
                    failures.append(outcome)
                    continue
                table = tables[name.partition_key]
                passed = _passed(zone, table, outcome) if table in merged else None
                if passed is not None:
                    context.log.error(f"{name}: {passed.error}")
                    failures.append(passed)
                    continue
                context.log.info(f"Copied {outcome.row_count} rows of {name}")
                metadata[table.partition_key] = snapshot_metadata(outcome, gates.get(name))
                seen = source_metadata(zone, outcome)
                context.log_event(dg.AssetObservation(sources[table], metadata=seen))
        if failures:
            # The step's own result would mark every table of the run as copied. Logged events of a
            # failed step are not in the result of the run, by which a sync names the failed tables.
            for key, entries in metadata.items():
                yield dg.AssetMaterialization(spec.key, partition=key, metadata=entries)
            named = [(str(f.name), f.error) for f in failures]
            raise_failed("Not copied", named, capture.name)
        for key, entries in metadata.items():
            context.add_asset_metadata(entries, asset_key=spec.key, partition_key=key)
        yield dg.MaterializeResult(asset_key=spec.key)

    return step.restore(snapshot)


def _take_partial(
    context: dg.AssetExecutionContext,
    capture: CdcCapture,
    postgres: PostgresResource,
    zone: RawZone,
    wanted: Sequence[CdcTable],
) -> SnapshotReport:
    """Take the partial snapshot that a command has asked for, unless an earlier attempt has.

    Raises:
        ConfigurationError: no command of this process has asked for it, or it is refused.
        TransientError: the table was merged past it. A retry takes another one.
    """
    request = partial_request.get()
    if request is None or [request.table.name] != [table.name for table in wanted]:
        raise ConfigurationError(
            reason="The predicate of a partial snapshot is not stored with its run, so the run "
            f"cannot be repeated. Use: pgcdc resnapshot {capture.name} SCHEMA.TABLE --where ..."
        )
    if request.report is None:
        report = build_partial_snapshot(capture, postgres.settings(), zone, request).take()
        if is_passed(zone, request.table, report.position, report.row_count):
            raise passed_error(request.table, report.position)
        request.report = report
        context.log.info(f"Copied the {report.row_count} rows of {report.name} that match")
    return request.report


def partial_metadata(report: SnapshotReport) -> dict[str, Any]:
    """Describe a partial snapshot."""
    return {
        "partial_rows": report.row_count,
        "snapshot_lsn": str(report.snapshot_lsn),
        "epoch": str(report.epoch),
        "bytes": float(report.bytes),
        "seconds": round(report.seconds, 3),
        "values_not_utf8": report.rescued_count,
    }


def _copied_before(context: dg.AssetExecutionContext) -> dict[str, dict[str, Any]]:
    """Return the metadata of the tables that earlier attempts of this run have copied."""
    if context.retry_number == 0:
        return {}
    entries = context.instance.all_logs(
        context.run.run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION
    )
    events = [entry.asset_materialization for entry in entries]
    return {e.partition: dict(e.metadata) for e in events if e is not None and e.partition}


def _passed(zone: RawZone, table: CdcTable, report: SnapshotReport) -> SnapshotFailure | None:
    """Return the error of a table that another instance merged past its snapshot."""
    if not is_passed(zone, table, report.position, report.row_count):
        return None
    name = table.qualified_name
    error = MergeConflict(
        table=name,
        reason="it was merged past the LSN of the snapshot while it was read, so the snapshot is "
        f"not applied. {resnapshot_remedy(zone.name, name)}. Or rebuild the table, which begins "
        f"with its newest snapshot: {rebuild_command(zone.name, name)}",
    )
    return SnapshotFailure(table.schema, table.table, error)


def source_metadata(zone: RawZone, report: SnapshotReport) -> dict[str, Any]:
    """Describe a source table as its copy saw it: columns with Postgres's types, and rows."""
    relation = zone.source_relations(report.epoch).newest_relation(report.name)
    columns = dg.TableSchema(columns=[])
    if relation is not None:
        comments = zone.definitions.newest(report.epoch).comments(relation.relation_id)
        columns = source_column_schema(relation, comments)
    return {
        "dagster/column_schema": columns,
        "dagster/row_count": report.row_count,
        "snapshot_lsn": str(report.snapshot_lsn),
        "source_name": str(report.name if relation is None else relation.name),
    }


def snapshot_metadata(report: SnapshotReport, gate: SchemaGate | None) -> dict[str, Any]:
    """Describe one table's copy.

    Args:
        gate: the schema events that were open before; None without one.
    """
    return {
        **({} if gate is None else {"reason": gate.reason}),
        "dagster/partition_row_count": report.row_count,
        "snapshot_lsn": str(report.snapshot_lsn),
        "epoch": str(report.epoch),
        "bytes": float(report.bytes),
        "seconds": round(report.seconds, 3),
        "rows_per_second": round(report.row_count / max(report.seconds, 1e-6), 1),
        "values_not_utf8": report.rescued_count,
        "ranges": report.ranges,
        "ranges_continued": report.ranges_continued,
        **({} if report.age is None else _age_metadata(report.age)),
    }


def _age_metadata(age: SnapshotAge) -> dict[str, Any]:
    return {
        "snapshot_seconds": round(age.seconds, 3),
        "snapshot_xmin_age": age.transactions,
    }
