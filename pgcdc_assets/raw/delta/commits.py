"""Commits of files to a raw table by delta-rs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Schema, Transaction
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction

from pgcdc_assets.raw.delta.files import WrittenFile

# Attempts of a commit that removes files, each after a commit of another process.
_ATTEMPTS = 15


def add_actions(files: Sequence[WrittenFile], *, data_change: bool) -> list[AddAction]:
    """Return the actions that add files to a table."""
    now = int(time.time() * 1000)
    return [
        AddAction(
            file.path,
            file.size_bytes,
            dict(file.partition_values),
            now,
            data_change,
            json.dumps(file.statistics),
        )
        for file in files
    ]


def commit_actions(
    table: DeltaTable,
    added: Sequence[AddAction],
    removed: Sequence[RemoveAction],
    transactions: Sequence[Transaction],
    *,
    schema: Schema,
    partition_by: Sequence[str],
    metadata: Mapping[str, Any],
    reload: Callable[[], DeltaTable | None],
) -> None:
    """Commit actions on top of a loaded version, or of a newer one that does not conflict.

    delta-rs detects a newer commit with one of the application ids. It does not detect a newer
    commit that removed the same files, such as OPTIMIZE of another program: the rows would be in
    the table twice. A commit that removes files is therefore tried on one version at a time.

    Args:
        reload: loads the newest version.

    Raises:
        CommitFailedError: a newer commit conflicts, or the commit failed.
    """
    retries = {"max_commit_retries": 0} if removed else {}
    for number in range(1, _ATTEMPTS + 1):
        try:
            table.create_write_transaction(
                [*added, *removed],
                "append",
                schema,
                partition_by=list(partition_by),
                commit_properties=CommitProperties(
                    custom_metadata=dict(metadata),
                    app_transactions=list(transactions) or None,
                    **retries,
                ),
                post_commithook_properties=PostCommitHookProperties(cleanup_expired_logs=False),
            )
        except CommitFailedError:
            newest = reload() if removed and number < _ATTEMPTS else None
            if newest is None or not _may_follow(newest, table, removed, transactions):
                raise
            table = newest
        else:
            return


def _may_follow(
    newest: DeltaTable,
    table: DeltaTable,
    removed: Sequence[RemoveAction],
    transactions: Sequence[Transaction],
) -> bool:
    """Return whether a commit that was based on `table` is right on top of `newest` too."""
    if newest.version() <= table.version():
        return False
    app_ids = {each.app_id for each in transactions}
    if any(newest.transaction_version(i) != table.transaction_version(i) for i in app_ids):
        return False
    left = set(pa.table(newest.get_add_actions())["path"].to_pylist())
    return left.issuperset(file.path for file in removed)
