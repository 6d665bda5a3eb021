"""Asset checks of the SCD tables: their own invariants, and their contents against the source.

The checks read whole tables, so they run on demand and in the job `<name>_checks`, not after every
merge. A run reads the source at one LSN for all its tables. A check reports counts and names of
columns, but no key. If a check cannot be evaluated, the step fails after all other checks.

`equals_source` waits for the capture. A run that materialises assets of the capture therefore skips
the check. If a table has no rows to compare yet, the check is a warning with the reason, and the
run succeeds.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import dagster as dg

from pgcdc_assets.errors import PgcdcError, TransientError
from pgcdc_assets.orchestration.checks.invariants import INVARIANTS_IN_FULL, found, full_spec
from pgcdc_assets.orchestration.checks.remedies import differing_rows
from pgcdc_assets.orchestration.names import Names, StepKeys
from pgcdc_assets.orchestration.resources import LakeResource, PostgresResource, SparkResource
from pgcdc_assets.orchestration.runs.failures import dagster_failures, raise_failed
from pgcdc_assets.orchestration.state import left_tables
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets.spark.catalog import CatalogTable, qualified_entry_name, register_tables
from pgcdc_assets.table_name import TableName
from pgcdc_assets.tables.state import read_scd_state, table_path
from pgcdc_assets.verify import (
    Comparison,
    ComparisonFailure,
    Findings,
    Moment,
    check_all,
    compare_tables,
    is_change_log,
    read_uncertain_values,
    record_comparison,
    source_moment,
    wait_captured,
)

if TYPE_CHECKING:
    from pgcdc_assets.spark.session import SparkSession

EQUALS_SOURCE = "equals_source"
REGISTERED = "registered"


_Outcome = tuple[dg.AssetCheckKey, dg.AssetCheckResult | PgcdcError]


class _NotCaptured(Exception):
    """The capture did not reach the LSN of the comparison in time."""


def build_table_checks(
    capture: CdcCapture, keys: Mapping[tuple[str, str, int], dg.AssetKey], raw: dg.AssetKey
) -> dg.AssetsDefinition:
    """Build the checks of all tables. Each check can be run alone.

    Args:
        keys: the SCD assets by schema, table and kind.
        raw: the raw asset.
    """
    names = Names.of(capture)
    tables = {t.name: t for t in capture.tables}
    places = {key: place for place, key in keys.items()}
    materialised = frozenset({raw, *places})
    step = StepKeys(capture.name)
    step_keys = {
        (schema, table, scd): step.key(f"scd{scd}", tables[TableName(schema, table)], key)
        for (schema, table, scd), key in keys.items()
    }

    @dg.multi_asset_check(
        name=names.check_tables_step,
        specs=[
            *(full_spec(key, scd) for (_, _, scd), key in step_keys.items()),
            *(_equality_spec(key) for (_, _, scd), key in step_keys.items() if scd == 1),
            *(_registration_spec(key) for key in step_keys.values() if capture.catalog is not None),
        ],
        can_subset=True,
        required_resource_keys={names.postgres, names.lake, names.spark},
    )
    def table_checks(context: dg.AssetCheckExecutionContext) -> Any:
        postgres: PostgresResource = getattr(context.resources, names.postgres)
        lake: LakeResource = getattr(context.resources, names.lake)
        spark: SparkResource = getattr(context.resources, names.spark)
        failures: list[tuple[str, Exception]] = []
        with dagster_failures(capture.name):
            zone = lake.zone(capture.name)
            checking = _CheckRun(capture, zone, postgres.settings, lambda: spark.session(zone.lake))
            checks = sorted(context.selected_asset_check_keys)
            if not materialised.isdisjoint(context.job_def.asset_layer.selected_asset_keys):
                checks = [check for check in checks if check.name != EQUALS_SOURCE]
                context.log.info(
                    f"{EQUALS_SOURCE} is not evaluated in a run that materialises assets: run job "
                    f"{names.check_job}, or the check alone"
                )
            wanted = {}
            for check in checks:
                schema, table, scd = places[check.asset_key]
                wanted[check] = tables[TableName(schema, table)], scd
            for check, outcome in checking.make(wanted):
                if isinstance(outcome, dg.AssetCheckResult):
                    yield outcome
                    continue
                table = wanted[check][0].qualified_name
                error = outcome.in_capture(capture.name, table)
                context.log.error(f"{table} ({check.name}): {error}")
                failures.append((f"{table} ({check.name})", error))
        if failures:
            raise_failed("Not checked", failures, capture.name)

    return step.restore(table_checks)


@dataclass(frozen=True)
class _CheckRun:
    """The checks of one run."""

    capture: CdcCapture
    zone: RawZone
    settings: Callable[[], ConnectionSettings]
    session: Callable[[], "SparkSession"]

    def make(self, checks: Mapping[dg.AssetCheckKey, tuple[CdcTable, int]]) -> Iterator[_Outcome]:
        """Evaluate checks of tables and kinds. The comparisons come last, at one LSN.

        A check that cannot be evaluated has an error in place of a result.
        """
        compared: dict[dg.AssetCheckKey, CdcTable] = {}
        registered: dict[CatalogTable, dg.AssetCheckKey] = {}
        left = left_tables(self.zone, self.capture)
        for check, (table, scd) in checks.items():
            try:
                if check.name == EQUALS_SOURCE and table.name in left:
                    yield check, _not_judged(check, left[table.name])
                elif not self._is_merged(table, scd):
                    yield check, _not_judged(check, "The table was never merged.")
                elif check.name == REGISTERED:
                    registered[CatalogTable(table.name, scd, self._path(table, scd))] = check
                elif check.name == INVARIANTS_IN_FULL:
                    yield check, found(self.zone.name, check, self._invariants(table, scd))
                elif is_change_log(self.zone, table):
                    yield check, _not_compared(check)
                else:
                    compared[check] = table
            except PgcdcError as error:
                yield check, error
        yield from self._register(registered)
        waiting = list(compared)
        try:
            for check, outcome in self._compare(compared):
                waiting.remove(check)
                yield check, outcome
        except _NotCaptured as reason:
            yield from ((check, _not_judged(check, str(reason))) for check in waiting)
        except PgcdcError as error:
            yield from ((check, error) for check in waiting)

    def _is_merged(self, table: CdcTable, scd: int) -> bool:
        path = self._path(table, scd)
        return read_scd_state(self.zone.lake, self.zone.name, path) is not None

    def _path(self, table: CdcTable, scd: int) -> str:
        return table_path(self.zone.lake, self.zone.name, table.schema, table.table, scd)

    def _register(self, checks: Mapping[CatalogTable, dg.AssetCheckKey]) -> Iterator[_Outcome]:
        """Register tables without an entry in the catalog, and check the entries."""
        policy = self.capture.catalog
        if policy is None or not checks:
            return
        waiting = dict(checks)
        try:
            for table, error in register_tables(self.session(), policy, checks):
                name = qualified_entry_name(policy, table.table, table.scd)
                check = waiting.pop(table)
                yield check, _registered(check, {"name": name}, error)
        except PgcdcError as error:
            yield from ((check, _registered(check, {}, error)) for check in waiting.values())

    def _invariants(self, table: CdcTable, scd: int) -> Findings:
        from pgcdc_assets.spark.session import own_sessions

        with own_sessions(self.session(), 1) as (session,):
            return check_all(session, self.zone, table, scd)

    def _compare(self, tables: Mapping[dg.AssetCheckKey, CdcTable]) -> Iterator[_Outcome]:
        """Compare tables with the source at one LSN.

        Raises:
            _NotCaptured: the capture did not reach the LSN in time.
            PgcdcError: the source or Spark is not available.
        """
        if not tables:
            return
        settings = self.settings()
        uncertain = read_uncertain_values(self.zone, self.capture.keepers)
        with _captured_moment(settings, self.zone, self.capture) as moment:
            outcomes = compare_tables(
                self.session(),
                settings,
                self.zone,
                self.capture.publication,
                [table.of_kinds([1]) for table in tables.values()],
                moment,
                named_rows=0,
            )
            for check, outcome in zip(tables, outcomes, strict=True):
                if isinstance(outcome, ComparisonFailure):
                    yield check, outcome.error
                else:
                    record_comparison(self.zone, uncertain, outcome)
                    yield check, _compared(self.zone.name, check, outcome)


@contextlib.contextmanager
def _captured_moment(
    settings: ConnectionSettings, zone: RawZone, capture: CdcCapture
) -> Iterator[Moment]:
    with source_moment(settings, zone, capture.slot) as moment:
        try:
            wait_captured(zone, moment, capture.verify_wait_seconds)
        except TransientError as error:
            raise _NotCaptured(str(error)) from error
        yield moment


def _equality_spec(key: dg.AssetKey) -> dg.AssetCheckSpec:
    return dg.AssetCheckSpec(
        EQUALS_SOURCE,
        asset=key,
        description="Every value of the table equals the source at one LSN. Writers may continue.",
    )


def _registration_spec(key: dg.AssetKey) -> dg.AssetCheckSpec:
    return dg.AssetCheckSpec(
        REGISTERED,
        asset=key,
        description="The catalog has an entry with the table's location. A missing entry is made.",
    )


def _registered(
    check: dg.AssetCheckKey, metadata: Mapping[str, str], error: PgcdcError | None
) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(
        asset_key=check.asset_key,
        check_name=check.name,
        passed=error is None,
        metadata={**metadata, **({} if error is None else {"reason": str(error)})},
    )


def _not_judged(check: dg.AssetCheckKey, reason: str) -> dg.AssetCheckResult:
    """Return the warning of a check that has nothing to compare yet."""
    return dg.AssetCheckResult(
        asset_key=check.asset_key,
        check_name=check.name,
        passed=False,
        severity=dg.AssetCheckSeverity.WARN,
        description=f"Not judged yet. {reason}",
        metadata={"is_judged": False, "reason": reason},
    )


def _not_compared(check: dg.AssetCheckKey) -> dg.AssetCheckResult:
    """Return the result of a table whose rows are not those of the source by its settings."""
    reason = "The source table has no key, so `without_key: log` makes this table a log of changes."
    return dg.AssetCheckResult(
        asset_key=check.asset_key,
        check_name=check.name,
        passed=True,
        description=f"Not compared. {reason}",
        metadata={"is_judged": False, "reason": reason},
    )


def _compared(capture: str, check: dg.AssetCheckKey, found: Comparison) -> dg.AssetCheckResult:
    table = TableName(found.schema, found.table)
    return dg.AssetCheckResult(
        asset_key=check.asset_key,
        check_name=check.name,
        passed=found.is_equal,
        description=None if found.is_equal else differing_rows(capture, table),
        metadata={
            "source_row_count": float(found.source_rows),
            "target_row_count": float(found.target_rows),
            "missing_row_count": float(found.missing),
            "extra_row_count": float(found.extra),
            "differing_row_count": float(found.differing),
            "differing_columns": ", ".join(found.columns) or "none",
            "lsn": str(found.lsn),
            "all_differences_counted": found.is_counted,
            "kept_row_count": float(found.kept),
        },
    )
