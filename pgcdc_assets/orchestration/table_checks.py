"""Asset checks of the SCD tables: their own invariants, and their contents against the source.

Both read whole tables, so they run on demand and in `<name>_checks`, not after every merge.
"""

from collections.abc import Mapping
from typing import Any

import dagster as dg

from pgcdc_assets.merge.watermark import read_target, table_path
from pgcdc_assets.orchestration.failures import dagster_failures
from pgcdc_assets.orchestration.names import Names
from pgcdc_assets.orchestration.resources import LakeResource, PostgresResource
from pgcdc_assets.orchestration.settings import CdcCapture
from pgcdc_assets.verify import Comparison, compare_table, count_duplicate_keys

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
        EQUALS_SOURCE: "The table equals the source, value by value, at one moment. Changes that "
        "are not merged yet show as differences.",
    }

    @dg.multi_asset_check(
        name=f"{capture.name}_table_checks",
        specs=[
            dg.AssetCheckSpec(name, asset=key, description=text)
            for key in current
            for name, text in described.items()
        ],
        can_subset=True,
        required_resource_keys={names.postgres, names.lake},
    )
    def table_checks(context: dg.AssetCheckExecutionContext) -> Any:
        postgres: PostgresResource = getattr(context.resources, names.postgres)
        lake: LakeResource = getattr(context.resources, names.lake)
        with dagster_failures():
            zone = lake.zone(capture.name)
            for check in sorted(context.selected_asset_check_keys):
                schema, table, scd = current[check.asset_key]
                path = table_path(zone.lake, capture.name, schema, table, scd)
                if read_target(zone.lake, capture.name, path) is None:
                    yield dg.AssetCheckResult(
                        asset_key=check.asset_key,
                        check_name=check.name,
                        passed=False,
                        metadata={"reason": "the table was never merged"},
                    )
                elif check.name == UNIQUE_KEY:
                    duplicates = count_duplicate_keys(
                        zone, schema, table, tables[schema, table].key
                    )
                    yield dg.AssetCheckResult(
                        asset_key=check.asset_key,
                        check_name=check.name,
                        passed=duplicates == 0,
                        metadata={"duplicate_key_count": duplicates},
                    )
                else:
                    found = compare_table(
                        postgres.settings(),
                        zone,
                        capture.publication,
                        schema,
                        table,
                        tables[schema, table].key,
                    )
                    yield _compared(check, found)

    return table_checks


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
        },
    )
