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
from pgcdc_assets.orchestration.invariant_checks import INVARIANTS_IN_FULL, found, full_spec
from pgcdc_assets.orchestration.names import Names
from pgcdc_assets.orchestration.resources import LakeResource, PostgresResource, SparkResource
from pgcdc_assets.orchestration.settings import CdcCapture
from pgcdc_assets.orchestration.targets import target_of
from pgcdc_assets.verify import (
    Comparison,
    Moment,
    check_all,
    compare_at,
    source_moment,
    wait_captured,
)

EQUALS_SOURCE = "equals_source"


def build_table_checks(
    capture: CdcCapture, keys: Mapping[tuple[str, str, int], dg.AssetKey]
) -> dg.AssetChecksDefinition:
    """Build the checks of all tables; each can be run alone."""
    names = Names.of(capture)
    tables = {(t.schema, t.table): t for t in capture.tables}
    places = {key: place for place, key in keys.items()}

    @dg.multi_asset_check(
        name=f"{capture.name}_table_checks",
        specs=[
            *(full_spec(key, scd) for key, (_, _, scd) in places.items()),
            *(
                _equality_spec(key)
                for key, (schema, table, scd) in places.items()
                if scd == 1 and tables[schema, table].mirrors_source
            ),
        ],
        can_subset=True,
        required_resource_keys={names.postgres, names.lake, names.spark},
    )
    def table_checks(context: dg.AssetCheckExecutionContext) -> Any:
        from pgcdc_assets.merge.session import own_sessions

        postgres: PostgresResource = getattr(context.resources, names.postgres)
        lake: LakeResource = getattr(context.resources, names.lake)
        spark: SparkResource = getattr(context.resources, names.spark)
        with dagster_failures(), contextlib.ExitStack() as held:
            zone = lake.zone(capture.name)
            moment: Moment | None = None
            for check in sorted(context.selected_asset_check_keys):
                schema, table, scd = places[check.asset_key]
                path = table_path(zone.lake, capture.name, schema, table, scd)
                declared = tables[schema, table]
                if read_target(zone.lake, capture.name, path) is None:
                    yield _failed(check, "the table was never merged")
                elif check.name == INVARIANTS_IN_FULL:
                    with own_sessions(spark.session(), 1) as (session,):
                        findings = check_all(session, zone, target_of(declared), scd)
                    yield found(check, findings)
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


def _equality_spec(key: dg.AssetKey) -> dg.AssetCheckSpec:
    return dg.AssetCheckSpec(
        EQUALS_SOURCE,
        asset=key,
        description="The table equals the source, value by value, at one LSN, whatever writers do "
        "meanwhile.",
    )


def _failed(check: dg.AssetCheckKey, reason: str) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(
        asset_key=check.asset_key,
        check_name=check.name,
        passed=False,
        metadata={"reason": reason},
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
