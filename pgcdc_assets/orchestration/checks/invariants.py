"""Asset checks of the invariants of SCD tables: after each merge, and in full on demand.

The step of the merge checks the changed rows, so the cost depends on the number of changes. A
violation fails the check but not the run, because the rows are merged already. A table without
changes is not checked again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import dagster as dg

from pgcdc_assets.lsn import Position
from pgcdc_assets.merge import MergeReport
from pgcdc_assets.orchestration.checks.remedies import broken_rules
from pgcdc_assets.orchestration.runs.failures import sentence_of
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.table_name import TableName
from pgcdc_assets.verify import Findings, check_merged

if TYPE_CHECKING:
    from pgcdc_assets.spark.session import SparkSession

INVARIANTS = "invariants"
INVARIANTS_IN_FULL = "invariants_in_full"

_HOLDS = {
    1: "Keys are unique, and older rows have the default of an added column",
    2: "The versions of a key do not overlap, at most one is current, the current versions equal "
    "SCD1 if the table has both kinds, and older versions have the default of an added column",
}

ScdName = tuple[str, str, int]


def invariant_spec(key: dg.AssetKey, scd: int) -> dg.AssetCheckSpec:
    """Return the specification of the check after each merge."""
    return dg.AssetCheckSpec(
        INVARIANTS, asset=key, description=f"{_HOLDS[scd]}: in the rows that the merge changed."
    )


def full_spec(key: dg.AssetKey, scd: int) -> dg.AssetCheckSpec:
    """Return the specification of the check of the whole table."""
    return dg.AssetCheckSpec(
        INVARIANTS_IN_FULL, asset=key, description=f"{_HOLDS[scd]}: in the whole table."
    )


def found(capture: str, check: dg.AssetCheckKey, findings: Findings) -> dg.AssetCheckResult:
    """Return the result of a check: counts, but no values of rows."""
    table = TableName(findings.schema, findings.table)
    since = findings.since
    metadata: dict[str, Any] = {
        "rows_looked_at": float(findings.row_count),
        "looked_at": "all rows" if since is None else f"rows changed since {since}",
        "seconds": round(findings.seconds, 3),
    }
    metadata.update((rule.value, float(n)) for rule, n in findings.violations.items())
    if findings.not_judged:
        reasons = (f"{rule.value}: {reason}" for rule, reason in findings.not_judged.items())
        metadata["not_judged"] = "; ".join(reasons)
    if not (findings.has_key or findings.violations):
        metadata["looked_at"] = "nothing: no key"
    return dg.AssetCheckResult(
        asset_key=check.asset_key,
        check_name=check.name,
        passed=findings.is_sound,
        severity=dg.AssetCheckSeverity.ERROR,
        description=None if findings.is_sound else broken_rules(capture, table),
        metadata=metadata,
    )


def not_checked(check: dg.AssetCheckKey, error: Exception) -> dg.AssetCheckResult:
    """Return the result of a check that failed to run."""
    return dg.AssetCheckResult(
        asset_key=check.asset_key,
        check_name=check.name,
        passed=False,
        severity=dg.AssetCheckSeverity.WARN,
        metadata={"reason": f"not checked: {sentence_of(error)}"},
    )


@dataclass(frozen=True)
class _Touched:
    """The rows of one table that a merge changed.

    Attributes:
        since: the position of the first change; None: all rows were changed.
        is_idle: no row was changed.
    """

    since: Position | None = None
    is_idle: bool = False

    @classmethod
    def by(cls, report: MergeReport, epoch: int) -> _Touched:
        """Return the changed rows according to a merge report.

        A merge of a snapshot changes the whole table, and may begin a new epoch.
        """
        if report.snapshot_lsn is not None or report.watermark_before is None:
            return cls(None)
        return cls(Position(epoch, report.watermark_before), is_idle=not report.changes_read)

    def together(self, other: _Touched) -> _Touched:
        """Combine the changed rows of two tables."""
        if self.is_idle or other.is_idle:
            return other if self.is_idle else self
        if self.since is None or other.since is None:
            return _Touched(None)
        return _Touched(min(self.since, other.since))


@dataclass
class MergeChecks:
    """The checks of a merge step's tables, made when their reports arrive.

    A history is compared with SCD1. If the step merges both, the check waits for both reports.

    Attributes:
        open_session: function that opens a session for the checks; the first check calls it.
        targets: tables by schema and table name, with all declared kinds of SCD table.
        merging: the SCD tables that the step merges.
        wanted: the checks to evaluate.
    """

    zone: RawZone
    open_session: Callable[[], SparkSession]
    targets: Mapping[TableName, CdcTable]
    merging: Collection[ScdName]
    wanted: Mapping[ScdName, dg.AssetCheckKey]
    _touched: dict[ScdName, _Touched] = field(default_factory=dict)
    _waiting: set[ScdName] = field(default_factory=set)
    _session: SparkSession | None = None

    def after(self, report: MergeReport, epoch: int) -> Iterator[dg.AssetCheckResult]:
        """Yield the checks that are possible after the merge of a table.

        Args:
            epoch: epoch of the newest merged window.
        """
        schema, table, scd = place = (report.schema, report.table, report.scd)
        image, history = (schema, table, 1), (schema, table, 2)
        self._touched[place] = _Touched.by(report, epoch)
        if scd == 1:
            yield from self._check(image, self._touched[image])
            if history in self._waiting:
                yield from self._check_history(history)
        elif image in self.merging and image not in self._touched:
            self._waiting.add(history)
        else:
            yield from self._check_history(history)

    def rest(self) -> Iterator[dg.AssetCheckResult]:
        """Yield the remaining checks: of histories whose SCD1 failed, and of unmerged tables."""
        for place in sorted(self._waiting):
            yield from self._check_history(place)
        for place in sorted(set(self.wanted) - set(self.merging)):
            yield from self._check(place, _Touched(None))

    def _check_history(self, place: ScdName) -> Iterator[dg.AssetCheckResult]:
        self._waiting.discard(place)
        touched = self._touched[place]
        image = self._touched.get((place[0], place[1], 1))
        yield from self._check(place, touched if image is None else touched.together(image))

    def _check(self, place: ScdName, touched: _Touched) -> Iterator[dg.AssetCheckResult]:
        check = self.wanted.get(place)
        if check is None or touched.is_idle:
            return
        schema, table, scd = place
        try:
            if self._session is None:
                self._session = self.open_session()
            findings = check_merged(
                self._session, self.zone, self.targets[TableName(schema, table)], scd, touched.since
            )
        except Exception as error:
            yield not_checked(check, error)
        else:
            yield found(self.zone.name, check, findings)
