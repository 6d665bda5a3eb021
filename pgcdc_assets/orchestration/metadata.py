"""Metadata of runs and observations: figures, names and LSNs, but no value of a row.

LSNs are text, as Postgres prints them. Figures that may exceed 2^31-1 are floats, because integer
entries of the UI have 32 bits, and a plot needs one type for the whole series.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import dagster as dg

from pgcdc_assets.capture.meter import Phase
from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.postgres.slots.status import SlotStatus
from pgcdc_assets.protocol.relation import Relation
from pgcdc_assets.raw.windows.summary import WindowSummary
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.tables.state import ScdState, read_scd_state

if TYPE_CHECKING:
    from pgcdc_assets.capture.window import CaptureReport
    from pgcdc_assets.merge import MergeReport

# Type names of Spark SQL, which the UI expects.
_SQL_NAMES = {"long": "bigint", "integer": "int", "short": "smallint", "byte": "tinyint"}

THROUGH_METADATA = "through_window"

_REMADE = "the folder had data files but no Delta log, so the table was rebuilt from the raw zone"

_OPERATIONS = {
    "I": "inserts",
    "U": "updates",
    "D": "deletes",
    "T": "truncates",
    "M": "messages",
    "P": "parked_rows",
}


def window_metadata(summary: WindowSummary) -> dict[str, Any]:
    """Describe a landed window. Every materialisation of the window has the same description."""
    window = summary.window
    return {
        "dagster/partition_row_count": summary.row_count,
        "transaction_count": float(summary.transaction_count),
        "changes": changes_table(summary.counts),
        **_operation_totals(summary.counts),
        "window": window.key,
        "epoch": str(window.epoch),
        "start_lsn": str(window.start),
        "end_lsn": str(window.end),
        "window_bytes": float(window.size_bytes),
        "first_commit_lsn": _text(summary.first_commit_lsn),
        "last_commit_lsn": _text(summary.last_commit_lsn),
        **_timestamp("first_commit", summary.first_commit_ts),
        **_timestamp("last_commit", summary.last_commit_ts),
    }


def capture_metadata(report: CaptureReport, summary: WindowSummary) -> dict[str, Any]:
    """Describe a window, and the run that landed or verified the window."""
    metadata = window_metadata(summary)
    metadata["already_captured"] = report.already_captured
    if not report.already_captured:
        metadata["seconds"] = round(report.seconds, 3)
        metadata["rows_per_second"] = round(report.rows_per_second, 1)
        metadata["bytes_received"] = float(report.bytes_received)
        metadata.update(phase_metadata(report.phase_seconds))
    metadata["warning_count"] = sum(report.warnings.values())
    if report.warnings:
        metadata["warnings"] = dg.MetadataValue.table(
            [
                dg.TableRecord({"warning": warning, "count": str(count)})
                for warning, count in sorted(report.warnings.items())
            ]
        )
    return metadata


def phase_metadata(seconds: Mapping[Phase, float]) -> dict[str, Any]:
    """Describe where the time of a capture went."""
    return {
        "seconds_waiting": round(seconds.get(Phase.WAITING, 0.0), 3),
        "seconds_decoding": round(seconds.get(Phase.DECODING, 0.0), 3),
        "seconds_writing": round(seconds.get(Phase.WRITING, 0.0), 3),
        "seconds_committing": round(seconds.get(Phase.COMMITTING, 0.0), 3),
    }


def lag_metadata(status: SlotStatus, captured_through: Lsn, lag_seconds: float) -> dict[str, Any]:
    """Describe the slot; the UI plots these figures.

    Args:
        lag_seconds: infinite if it is not known, which the UI cannot plot.
    """
    metadata: dict[str, Any] = {
        "lag_bytes": float(max(0, status.current_lsn - captured_through)),
        "lag_seconds": round(lag_seconds, 1) if math.isfinite(lag_seconds) else 0.0,
        "retained_bytes": float(status.retained_bytes or 0),
        "wal_status": status.wal_status.value,
        "is_active": status.is_active,
        "captured_through": str(captured_through),
        "confirmed_flush_lsn": _text(status.confirmed_flush_lsn),
        "restart_lsn": _text(status.restart_lsn),
        "current_lsn": str(status.current_lsn),
    }
    if status.active_pid is not None:
        metadata["active_pid"] = status.active_pid
    if status.safe_wal_size is not None:
        metadata["safe_wal_size"] = float(status.safe_wal_size)
    return metadata


@dataclass(frozen=True)
class MergeMetadata:
    """The metadata of a merge of one table, for the windows that the merge materialises.

    Attributes:
        state: entries about the table after the merge, which every window shows.
        figures: entries about the whole merge. Only the newest window shows them, so that sums and
            plots over windows count each merge once.
        windows: entries of each window with changes of the table.
    """

    state: Mapping[str, Any]
    figures: Mapping[str, Any]
    windows: Mapping[str, Mapping[str, float]]
    newest: str

    @classmethod
    def of(
        cls, report: MergeReport, through: LsnWindow, windows: Sequence[WindowSummary]
    ) -> MergeMetadata:
        """Describe a merge.

        Args:
            windows: summaries of the windows to materialise.
        """
        state: dict[str, Any] = {
            THROUGH_METADATA: through.key,
            "watermark": _text(report.watermark_after),
            "path": dg.MetadataValue.path(report.path),
            **_window_figures({}),
        }
        if report.source_name is not None:
            state["source_name"] = str(report.source_name)
        if report.row_count is not None:
            state["dagster/row_count"] = report.row_count
        names = report.names or {report.name}
        changed = {
            summary.window.key: _window_figures(summary.count_operations(names))
            for summary in windows
            if summary.count_changes(names)
        }
        return cls(state, _merge_figures(report), changed, through.key)

    def for_window(self, key: str) -> dict[str, Any]:
        """Return the metadata of a window without the state."""
        return {**self.windows.get(key, {}), **(self.figures if key == self.newest else {})}

    @property
    def shown_apart(self) -> set[str]:
        """The windows with further metadata than the state."""
        return {*self.windows, self.newest}


def _window_figures(counts: Mapping[str, int]) -> dict[str, float]:
    return {"window_changes": float(sum(counts.values())), **_operation_totals({"": counts})}


def _merge_figures(report: MergeReport) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "watermark_before": _text(report.watermark_before),
        "steps": report.steps,
        "windows_folded": report.windows_folded,
        "changes_read": float(report.changes_read),
        "rows_inserted": float(report.rows_inserted),
        "rows_updated": float(report.rows_updated),
        "rows_deleted": float(report.rows_deleted),
        "rows_rescued": float(report.rows_rescued),
        "seconds": round(report.seconds, 3),
    }
    if report.seconds > 0 and report.changes_read:
        figures["changes_per_second"] = round(report.changes_read / report.seconds, 1)
    if report.columns_filled:
        figures["columns_filled"] = ", ".join(report.columns_filled)
    if report.is_remade:
        figures["made_again"] = _REMADE
    if report.left_out:
        figures["left_out"] = report.left_out
    if report.spark_reason:
        figures["merged_by_spark"] = report.spark_reason
    if report.snapshot_lsn is not None:
        figures["snapshot_lsn"] = str(report.snapshot_lsn)
    return figures


def merge_warnings(report: MergeReport) -> list[str]:
    """Return the warnings of a merge for the run's log."""
    return [*([_REMADE] if report.is_remade else []), *filter(None, [report.left_out])]


def changes_table(counts: Mapping[str, Mapping[str, int]]) -> dg.TableMetadataValue:
    """Return a metadata table of the rows by table and operation."""
    columns = [dg.TableColumn("table", "string")]
    columns += [dg.TableColumn(name, "int") for name in _OPERATIONS.values()]
    records = [
        dg.TableRecord(
            {"table": table, **{name: ops.get(op, 0) for op, name in _OPERATIONS.items()}}
        )
        for table, ops in sorted(counts.items())
    ]
    return dg.MetadataValue.table(records, schema=dg.TableSchema(columns=columns))


def column_lineage(
    columns: Sequence[str], source_columns: Sequence[str], source: dg.AssetKey
) -> dg.TableColumnLineage:
    """Return the column lineage: the source column of each column."""
    known = set(source_columns)
    return dg.TableColumnLineage(
        deps_by_column={
            name: [dg.TableColumnDep(asset_key=source, column_name=name)]
            for name in columns
            if name in known
        }
    )


def _operation_totals(counts: Mapping[str, Mapping[str, int]]) -> dict[str, float]:
    totals = dict.fromkeys(_OPERATIONS.values(), 0.0)
    for ops in counts.values():
        for op, count in ops.items():
            totals[_OPERATIONS[op]] += count
    return totals


def _timestamp(name: str, moment: Any) -> dict[str, Any]:
    return {} if moment is None else {name: dg.MetadataValue.timestamp(moment)}


def _text(lsn: Lsn | None) -> str:
    return "none" if lsn is None else str(lsn)


def table_metadata(zone: RawZone, report: MergeReport, source: dg.AssetKey) -> dict[str, Any]:
    """Describe a table after a merge: columns with their lineage, and rows."""
    # The merge keeps the state, so the log is mostly not read again.
    state = read_scd_state(zone.lake, zone.name, report.path)
    columns = [] if state is None else _describe_columns(state)
    names = [column.name for column in columns]
    metadata: dict[str, Any] = {
        "dagster/column_schema": dg.TableSchema(columns=columns),
        "dagster/column_lineage": column_lineage(
            names, [name for name in names if not name.startswith("_")], source
        ),
    }
    if report.row_count is None and state is not None and state.row_count is not None:
        metadata["dagster/row_count"] = state.row_count
    return metadata


def source_column_schema(relation: Relation, comments: Mapping[int, str] | None) -> dg.TableSchema:
    """Describe the columns of a source table, with Postgres's types.

    Args:
        comments: comments of the columns by attnum; None: unknown.
    """
    known = comments or {}
    return dg.TableSchema(
        columns=[
            dg.TableColumn(
                column.name,
                column.type or "unknown",
                None if column.attnum is None else known.get(column.attnum),
                tags={"key": ""} if column.is_key else None,
            )
            for column in relation.columns
        ]
    )


def _describe_columns(state: ScdState) -> list[dg.TableColumn]:
    """Describe the columns. The description is the source's comment, else the Postgres type."""
    return [
        dg.TableColumn(
            name=field.name,
            type=_type_name(field.type),
            description=field.metadata.get("comment"),
            constraints=dg.TableColumnConstraints(nullable=field.nullable),
        )
        for field in state.table.schema().fields
    ]


def _type_name(kind: Any) -> str:
    name = getattr(kind, "type", None)
    if name == "array":
        return f"array<{_type_name(kind.element_type)}>"
    if name == "map":
        return f"map<{_type_name(kind.key_type)},{_type_name(kind.value_type)}>"
    if name == "struct":
        parts = (f"{field.name}:{_type_name(field.type)}" for field in kind.fields)
        return f"struct<{','.join(parts)}>"
    return _SQL_NAMES.get(str(name or kind), str(name or kind))
