"""The job `<name>_rebuild`, which builds SCD tables from the raw zone; `pgcdc rebuild` runs it.

The job waits for the merge's pool, so that no merge runs at the same time. A rebuild materialises
no windows: after a rebuild through an earlier LSN the merge sensor requests the remaining windows,
as for any table that is behind.
"""

from typing import Any

import dagster as dg
from pydantic import Field

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.merge import RebuildReport, rebuild_table
from pgcdc_assets.orchestration.names import Names
from pgcdc_assets.orchestration.resources import LakeResource, SparkResource
from pgcdc_assets.orchestration.runs.claims import claim_run
from pgcdc_assets.orchestration.runs.executor import run_executor
from pgcdc_assets.orchestration.runs.failures import dagster_failures, raise_failed
from pgcdc_assets.orchestration.runs.records import CAPTURE_TAG
from pgcdc_assets.settings import CdcCapture


class RebuildConfig(dg.Config):
    """The tables to rebuild, and the LSN.

    Attributes:
        tables: names as `schema.table`; empty: all tables.
        through: an LSN such as `16/B374D848`; None: the end of the captured changes.
    """

    tables: list[str] = Field(default=[])
    through: str | None = None


def rebuild_op_name(capture: CdcCapture) -> str:
    """Return the name of the job's op, which has the config."""
    return f"{capture.name}_rebuild_tables"


def build_rebuild_job(
    capture: CdcCapture, keys: dict[tuple[str, str, int], dg.AssetKey]
) -> dg.JobDefinition:
    """Build the job.

    Args:
        keys: the SCD assets; each gets an observation.
    """
    names = Names.of(capture)

    @dg.op(
        name=rebuild_op_name(capture),
        pool=names.merge_pool,
        required_resource_keys={names.lake, names.spark},
        out=dg.Out(dg.Nothing),
    )
    def rebuild(context: dg.OpExecutionContext, config: RebuildConfig) -> None:
        lake: LakeResource = getattr(context.resources, names.lake)
        spark: SparkResource = getattr(context.resources, names.spark)
        failures: list[tuple[str, Exception]] = []
        with claim_run(context), dagster_failures(capture.name):
            through = parse_lsn(config.through)
            tables = capture.select_tables(config.tables)
            zone = lake.zone(capture.name)
            for table in tables:
                for scd in table.scd:
                    try:
                        report = rebuild_table(spark.session(zone.lake), zone, table, scd, through)
                    except Exception as error:
                        context.log.error(f"{table.qualified_name}: {type(error).__name__}")
                        failures.append((table.qualified_name, error))
                        continue
                    if report.changes_missing:
                        context.log.warning(
                            f"{table.qualified_name}: {report.changes_missing} changes that were "
                            "landed are missing from the raw zone, so the table was built without "
                            "them. Another program has deleted them."
                        )
                    context.log_event(
                        dg.AssetObservation(
                            keys[table.schema, table.table, scd], metadata=_metadata(report)
                        )
                    )
        if failures:
            raise_failed("Not rebuilt", failures, capture.name)

    @dg.job(
        name=names.rebuild_job,
        description="Builds SCD tables from the raw zone alone, and replaces the live ones.",
        executor_def=run_executor,
        tags={CAPTURE_TAG: capture.name},
    )
    def rebuild_job() -> None:
        rebuild()

    return rebuild_job


def parse_lsn(text: str | None) -> Lsn | None:
    """Parse an LSN from the user's input.

    Raises:
        ConfigurationError: the text is not an LSN.
    """
    try:
        return None if text is None else Lsn.parse(text)
    except ValueError as error:
        raise ConfigurationError(reason=f"`through` is {error}.") from error


def _metadata(report: RebuildReport) -> dict[str, Any]:
    before = report.watermark_before
    return {
        "rebuilt_through": str(report.watermark_after),
        "watermark_before": "none" if before is None else str(before[1]),
        "epoch": str(report.epoch),
        "changes_read": float(report.changes_read),
        "changes_missing": float(report.changes_missing),
        "dagster/row_count": report.row_count,
        "seconds": round(report.seconds, 3),
    }
