"""Asset checks of the SCD tables: their own invariants, and their contents against the source.

Both read whole tables, so they run on demand and in `<name>_checks`, not after every merge. The
source is read at one LSN for all tables of a run; what a check tells are counts and names of
columns, never a key.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

import dagster as dg

from pgcdc_assets.merge.watermark import read_target, table_path
from pgcdc_assets.orchestration.failures import dagster_failures
from pgcdc_assets.orchestration.names import Names
from pgcdc_assets.orchestration.resources import LakeResource, PostgresResource, SparkResource
from pgcdc_assets.orchestration.settings import CdcCapture
from pgcdc_assets.orchestration.targets import target_of
from pgcdc_assets.verify import (
    Comparison,
    Moment,
    compare_at,
    count_duplicate_keys,
    source_moment,
    wait_captured,
)

UNIQUE_KEY = "unique_key"
EQUALS_SOURCE = "equals_source"


def build_table_checks(
    capture: CdcCapture, keys: Mapping[tuple[str, str, int], dg.AssetKey]
) -> dg.AssetChecksDefinition:
    """Build the checks of all tables; each can be run alone."""
    names = Names.of(capture)
    tables = {(t.schema, t.table): t for t in capture.tables}
    current = {key: place for place, key in keys.items() if place[2] == 1}
    described = {
        UNIQUE_KEY: "No two rows have the same key, and no key is NULL.",
        EQUALS_SOURCE: "The table equals the source, value by value, at one LSN, whatever writers "
        "do meanwhile.",
    }

    @dg.multi_asset_check(
        name=f"{capture.name}_table_checks",
        specs=[
            dg.AssetCheckSpec(name, asset=key, description=text)
            for key in current
            for name, text in described.items()
        ],
        can_subset=True,
        required_resource_keys={names.postgres, names.lake, names.spark},
    )
    def table_checks(context: dg.AssetCheckExecutionContext) -> Any:
        postgres: PostgresResource = getattr(context.resources, names.postgres)
        lake: LakeResource = getattr(context.resources, names.lake)
        spark: SparkResource = getattr(context.resources, names.spark)
        with dagster_failures(), contextlib.ExitStack() as held:
            zone = lake.zone(capture.name)
            moment: Moment | None = None
            for check in sorted(context.selected_asset_check_keys):
                schema, table, scd = current[check.asset_key]
                path = table_path(zone.lake, capture.name, schema, table, scd)
                declared = tables[schema, table]
                if read_target(zone.lake, capture.name, path) is None:
                    yield _failed(check, "the table was never merged")
                elif check.name == UNIQUE_KEY:
                    yield _unique(check, count_duplicate_keys(zone, schema, table, declared.key))
                else:
                    if moment is None:
                        moment = held.enter_context(
                            source_moment(postgres.settings(), zone, capture.slot)
                        )
                        wait_captured(zone, moment, capture.verify_wait_seconds)
                    yield _compared(
                        check,
                        compare_at(
                            spark.session(),
                            postgres.settings(),
                            zone,
                            capture.publication,
                            target_of(declared, [1]),
                            moment,
                            named_rows=0,
                        ),
                    )

    return table_checks


def _failed(check: dg.AssetCheckKey, reason: str) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(
        asset_key=check.asset_key,
        check_name=check.name,
        passed=False,
        metadata={"reason": reason},
    )


def _unique(check: dg.AssetCheckKey, duplicates: int) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(
        asset_key=check.asset_key,
        check_name=check.name,
        passed=duplicates == 0,
        metadata={"duplicate_key_count": duplicates},
    )


def _compared(check: dg.AssetCheckKey, found: Comparison) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(
        asset_key=check.asset_key,
        check_name=check.name,
        passed=found.is_equal,
        metadata={
            "source_row_count": float(found.source_rows),
            "target_row_count": float(found.target_rows),
            "missing_row_count": float(found.missing),
            "extra_row_count": float(found.extra),
            "differing_row_count": float(found.differing),
            "differing_columns": ", ".join(found.columns) or "none",
            "lsn": str(found.lsn),
            "all_differences_counted": found.is_counted,
        },
    )
