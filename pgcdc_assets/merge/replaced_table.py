"""The table that a rebuild replaces: its description, and the commit that replaces its contents.

delta-rs writes the commit, because only delta-rs can add the files of one table to the log of
another table together with schema and watermark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction

from pgcdc_assets.errors import ConfigurationError, PgcdcError, TableDamaged, TransientError
from pgcdc_assets.lsn import Position
from pgcdc_assets.raw.log_table import open_delta_table
from pgcdc_assets.raw.store_errors import explain_store_error
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.tables.fence import Step, fence_app_id, fence_transactions, read_fence
from pgcdc_assets.tables.owned_columns import (
    NOTHING_OWNED,
    OwnedColumns,
    find_owned,
    versions_of_table,
)
from pgcdc_assets.tables.properties import MAPPING
from pgcdc_assets.tables.state import is_unsupported, is_written, open_table, read_position

_ATTEMPTS = 5

# Table features that an owner may turn on, and that delta-rs does not write.
_FOR_SPARK = frozenset({"clustering", "domainMetadata", "rowTracking"})


@dataclass(frozen=True)
class ReplacedTable:
    """The table that a rebuild replaces.

    Attributes:
        owned: the owner's columns and comments.
        is_for_spark: the table has features that delta-rs cannot write.
        is_readable: the log can be read. Otherwise nothing else is known.
    """

    path: str
    watermark: Position | None
    properties: Mapping[str, str]
    columns: tuple[str, ...]
    owned: OwnedColumns
    is_for_spark: bool = False
    is_readable: bool = True


def describe_replaced(zone: RawZone, target: CdcTable, path: str) -> ReplacedTable | None:
    """Describe the table that a rebuild replaces; return None if there is no table."""
    try:
        table = open_table(zone.lake, path)
    except TableDamaged:
        return ReplacedTable(path, None, {}, (), NOTHING_OWNED, is_readable=False)
    if table is None:
        return None
    try:
        watermark = read_position(zone, table, path)
    except TableDamaged:
        watermark = None
    columns = tuple(field.name for field in table.schema().fields)
    properties = table.metadata().configuration
    owned = NOTHING_OWNED
    # With column mapping, the log has a number for each column, which the staged table lacks.
    if MAPPING not in properties:
        versions = versions_of_table(zone, target.schema, target.table)
        owned = find_owned(table.schema().to_json(), properties, versions)
    features = table.protocol().writer_features or ()
    is_for_spark = not _FOR_SPARK.isdisjoint(features)
    return ReplacedTable(path, watermark, properties, columns, owned, is_for_spark)


def open_again(zone: RawZone, path: str) -> DeltaTable:
    """Open a table that a rebuild has found before.

    Raises:
        TransientError: the table cannot be read, or was deleted.
    """
    try:
        table = open_delta_table(zone.lake, path)
    except (DeltaError, OSError) as error:
        raise TransientError(
            reason=f"The Delta table {path} cannot be read ({type(error).__name__}). Run it again."
        ) from error
    if table is None:
        raise TransientError(reason=f"There is no Delta table {path} any more. Run it again.")
    return table


def replace_files(
    zone: RawZone,
    staged: DeltaTable,
    replaced: ReplacedTable,
    added: Sequence[AddAction],
    position: Position,
) -> None:
    """Replace a table's files, schema and watermark by those of the staged table, in one commit.

    Args:
        added: files that are in the table's folder already.
        position: epoch and watermark of the files.

    Raises:
        ConfigurationError: delta-rs cannot write a feature of the table.
        TransientError: the log could not be written, or other writers committed every time.
    """
    path = replaced.path
    schema = Schema.from_json(replaced.owned.add_to(staged.schema().to_json()))
    own = {action.path for action in added}
    for _ in range(_ATTEMPTS):
        live = open_again(zone, path)
        # A commit that adds a live file again also removes the file: readers that apply the actions
        # in their order, such as Spark, would lose its rows. Only an earlier attempt adds them.
        if not own.isdisjoint(pa.table(live.get_add_actions()).column("path").to_pylist()):
            return
        step = Step(fence_app_id(zone.name), read_fence(live, zone.name) + 1, position)
        try:
            live.create_write_transaction(
                list(added),
                "overwrite",
                schema,
                partition_by=staged.metadata().partition_columns,
                commit_properties=CommitProperties(
                    custom_metadata={
                        "userMetadata": step.metadata,
                        "pgcdc": {"rebuilt_through": str(position.lsn)},
                    },
                    app_transactions=fence_transactions(zone, *position, step.number),
                    max_commit_retries=0,
                ),
            )
            return
        except (DeltaError, OSError) as error:
            if isinstance(error, CommitFailedError) and is_unsupported(error):
                raise ConfigurationError(
                    reason=f"The Delta table {path} has features that a rebuild cannot write. "
                    "Move the table to another folder; the next merge creates it again."
                ) from error
            # If the answer to a conditional PUT is lost, delta-rs finds its own log entry and takes
            # the entry for the commit of another process. A checkpoint after the commit may fail.
            if is_written(zone, path, step):
                return
            if not isinstance(error, CommitFailedError):
                raise unwritable_error(path, error) from error
            # A merge committed at the same time; its rows are replaced too.
    raise TransientError(
        reason=f"Merges of {path} committed before every attempt of its rebuild, and the table is "
        "as they left it. Stop the merges, and run it again."
    )


def unwritable_error(path: str, error: Exception) -> PgcdcError:
    """Return the error of a rebuild that could not write to the lake."""
    return explain_store_error(path, error) or TransientError(
        reason=f"The Delta table {path} cannot be written ({type(error).__name__}), and is "
        "unchanged. Run it again."
    )
