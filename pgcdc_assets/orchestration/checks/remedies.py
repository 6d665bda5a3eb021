"""What to type after a failed check: the UI shows the sentence as the description of the result."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from pgcdc_assets.error_text import first_names
from pgcdc_assets.errors import rebuild_command, resnapshot_remedy
from pgcdc_assets.table_name import TableName

_NAMED = 5


def lost_windows(capture: str, holes: Iterable[str]) -> str:
    """Return the sentence about windows that the raw zone has lost."""
    return (
        f"The raw zone lacks windows: {first_names(list(holes), _NAMED)}. Restore all folders of "
        f"the capture from one backup. Without a backup: {resnapshot_remedy(capture)}"
    )


def lost_rows(capture: str, window: str, tables: Iterable[TableName]) -> str:
    """Return the sentence about landed rows that are missing.

    Args:
        window: the key of the first window with missing rows.
        tables: the declared tables of these rows; empty if they are not known.
    """
    remedy = resnapshot_remedy(capture, *sorted(map(str, tables)))
    return (
        f"The rows of window {window} are not those that were landed: another program has changed "
        f"raw/changes. Merges of their tables stop there. Restore the rows from a backup. Without "
        f"a backup: {remedy}"
    )


def parked_rows(capture: str, reasons: Iterable[str], tables: Iterable[TableName]) -> str:
    """Return the sentence about tables that wait for a snapshot of rows that were not decoded."""
    remedy = resnapshot_remedy(capture, *sorted(map(str, tables)))
    return (
        f"{first_names(list(reasons), _NAMED)}. The lag sensor requests the snapshots. With "
        f"`on_poisoned_row: stop` it does not: {remedy}"
    )


def broken_rules(capture: str, table: TableName) -> str:
    """Return the sentence about an SCD table that does not follow its rules."""
    return (
        f"The rows of {table} break rules, which the metadata count. Rebuild the table from the "
        f"raw zone: {rebuild_command(capture, str(table))}; then compare it with the source: "
        f"{_verify(capture, table)}"
    )


def differing_rows(capture: str, table: TableName) -> str:
    """Return the sentence about an SCD table that differs from its source."""
    return (
        f"{table} differs from the source. {_verify(capture, table)} prints keys of differing "
        f"rows. Rebuild the table from the raw zone: {rebuild_command(capture, str(table))}. If it "
        f"still differs: {resnapshot_remedy(capture, str(table))}"
    )


def _verify(capture: str, table: TableName) -> str:
    return shlex.join(["pgcdc", "verify", "--name", capture, str(table)])
