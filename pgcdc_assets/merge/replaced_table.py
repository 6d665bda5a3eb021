"""The table that a rebuild replaces: its description, and the commit that replaces its contents.

delta-rs writes the commit, because only delta-rs can add the files of one table to the log of
another table together with schema and watermark. If the log of the table cannot be read, Spark
creates the table again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction

from pgcdc_assets.error_text import first_line, first_sentence
from pgcdc_assets.errors import (
    ConfigurationError,
    DefiniteError,
    PgcdcError,
    TableDamaged,
    TransientError,
)
from pgcdc_assets.lsn import Position
from pgcdc_assets.raw.delta.log_table import open_delta_table
from pgcdc_assets.raw.delta.refused_commits import WRITTEN_FEATURES, is_unsupported
from pgcdc_assets.raw.store_errors import explain_store_error
from pgcdc_assets.raw.table_files import set_log_aside
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.spark.sql import delta_table, string
from pgcdc_assets.tables.checkpoints import WITHOUT_UPKEEP
from pgcdc_assets.tables.fence import (
    Step,
    fence_app_id,
    fence_transactions,
    read_fence,
    read_watermarks,
)
from pgcdc_assets.tables.merge_notes import NOTES, PAST_NOTES, last_fence_of_notes
from pgcdc_assets.tables.owned_columns import (
    NOTHING_OWNED,
    OwnedColumns,
    find_owned,
    versions_of_table,
)
from pgcdc_assets.tables.properties import (
    APPEND_ONLY,
    CONSTRAINT,
    KEY,
    MAPPING,
    MAX_COLUMN_ID,
    is_append_only,
)
from pgcdc_assets.tables.state import (
    is_written,
    open_table,
    record_watermark,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ATTEMPTS = 5

# Prefixes of properties that Delta itself assigns to a new table.
_ASSIGNED = (MAX_COLUMN_ID, "delta.rowTracking.materialized")


@dataclass(frozen=True)
class ReplacedTable:
    """The table that a rebuild replaces.

    Attributes:
        owned: the owner's columns and comments.
        is_for_spark: the table has features that delta-rs may not write, or CHECK constraints.
        is_readable: the log can be read. Otherwise nothing else is known.
        is_ahead: the raw zone is older than the table.
    """

    path: str
    watermark: Position | None
    properties: Mapping[str, str]
    columns: tuple[str, ...]
    owned: OwnedColumns
    is_for_spark: bool = False
    is_readable: bool = True
    is_ahead: bool = False


def describe_replaced(zone: RawZone, target: CdcTable, path: str) -> ReplacedTable | None:
    """Describe the table that a rebuild replaces; return None if there is no table.

    Raises:
        ConfigurationError: the table is append-only, or another program has made it.
    """
    try:
        table = open_table(zone.lake, path)
    except TableDamaged:
        return ReplacedTable(path, None, {}, (), NOTHING_OWNED, is_readable=False)
    if table is None:
        return None
    # After a restore of the raw zone, the table may be in an epoch that the zone does not have.
    epochs = range(1, len(zone.epochs.all()) + 2)
    try:
        found = read_watermarks(zone, table, path, epochs)
        watermark = max((Position(*mark) for mark in found.items()), default=None)
    except TableDamaged:
        watermark = None
    columns = tuple(field.name for field in table.schema().fields)
    properties = table.metadata().configuration
    if watermark is None and KEY not in properties:
        raise ConfigurationError(
            reason=f"The Delta table {path} was not made by this package. Move it to another "
            "folder; the next merge creates the table of the source."
        )
    if is_append_only(properties):
        raise ConfigurationError(
            reason=f"The Delta table {path} is append-only, so a rebuild cannot replace its rows. "
            f"Run in Spark: ALTER TABLE {delta_table(path)} UNSET TBLPROPERTIES "
            f"({string(APPEND_ONLY)}); then run the rebuild again."
        )
    owned = NOTHING_OWNED
    # With column mapping, the log has a number for each column, which the staged table lacks.
    if MAPPING not in properties:
        versions = versions_of_table(zone, target.schema, target.table)
        owned = find_owned(table.schema().to_json(), properties, versions)
    features = table.protocol().writer_features or ()
    is_for_spark = not WRITTEN_FEATURES.issuperset(features)
    is_for_spark |= any(name.startswith(CONSTRAINT) for name in properties)
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
    snapshots: tuple[Position, ...],
) -> None:
    """Replace a table's files, schema and watermark by those of the staged table, in one commit.

    Args:
        added: files that are in the table's folder already.
        position: epoch and watermark of the files.
        snapshots: positions of the snapshots in the files.

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
        step = find_next_step(zone, live, path, position, snapshots)
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
                post_commithook_properties=WITHOUT_UPKEEP,
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


def find_next_step(
    zone: RawZone, live: DeltaTable, path: str, position: Position, snapshots: tuple[Position, ...]
) -> Step:
    """Return the step of the commit that replaces the contents of a table.

    The notes are removed later, and a note that holds would change the new rows. If the fence has
    expired and the log has lost the newest write, no merge can begin, and Delta accepts any number.
    """
    try:
        fence = read_fence(zone.lake, live, path, zone.name)
    except TableDamaged:
        fence = last_fence_of_notes(live)
    return Step(fence_app_id(zone.name), fence + PAST_NOTES, position, snapshots=snapshots)


def create_again(
    spark: SparkSession,
    zone: RawZone,
    staged: DeltaTable,
    staged_path: str,
    path: str,
    position: Position,
    snapshots: tuple[Position, ...],
) -> None:
    """Set the unreadable log of a table aside, and create the table from the staged rows.

    Spark creates the table, because of two writers of the first commit one wins, in each store. If
    the process dies before, the table has no log, and the next merge builds the table from the raw
    zone.

    Args:
        position: epoch and watermark of the rows.
        snapshots: positions of the snapshots in the rows.

    Raises:
        TransientError: another process has created the table, or the table could not be written.
    """
    from pyspark.sql import functions as F

    from pgcdc_assets.spark.errors import describe_failure, is_conflict

    try:
        if open_table(zone.lake, path) is not None:
            raise _created_by_another(path)
    except TableDamaged:
        try:
            set_log_aside(zone, path)
        except OSError as error:
            found = explain_store_error(path, error) or _not_created(path, first_line(error))
            raise found from error
    step = Step(fence_app_id(zone.name), 1, position, snapshots=snapshots)
    metadata = staged.metadata()
    writer = spark.read.format("delta").load(staged_path).writeTo(delta_table(path)).using("delta")
    writer = writer.options(**step.options)
    if metadata.partition_columns:
        writer = writer.partitionedBy(*map(F.col, metadata.partition_columns))
    for name, value in metadata.configuration.items():
        if not name.startswith(_ASSIGNED) and name not in NOTES:
            writer = writer.tableProperty(name, value)
    if metadata.description:
        writer = writer.tableProperty("comment", metadata.description)
    try:
        # Delta skips the write if another writer has created the table before.
        writer.createOrReplace()
    except Exception as error:
        if is_conflict(error):
            raise _created_by_another(path) from error
        raise _not_created(path, describe_failure(error)) from error
    if not is_written(zone, path, step):
        raise _created_by_another(path)
    record_watermark(zone, path)


def _created_by_another(path: str) -> TransientError:
    return TransientError(
        reason=f"Another process has created the Delta table {path} during its rebuild. The table "
        "is as that process left it, and the rebuild wrote nothing to it. Run the rebuild again "
        "only if the table is not as you need it."
    )


def _not_created(path: str, failure: str) -> TransientError:
    return TransientError(
        reason=f"The damaged log of {path} was not replaced: {failure}. Run the rebuild again. If "
        "the log is gone, the next merge builds the table from the raw zone."
    )


def explain_overwrite(path: str, error: Exception) -> PgcdcError:
    """Return the error of a rebuild whose rows Spark could not write to the table.

    The text of a Spark error may quote values of rows.
    """
    from pgcdc_assets.spark.errors import definite_condition_of, describe_failure

    definite = definite_condition_of(error)
    if definite is None:
        return explain_store_error(path, error) or TransientError(
            reason=f"The rebuild of the Delta table {path} was not finished: "
            f"{describe_failure(error)}. Run it again."
        )
    return DefiniteError(
        reason=f"The Delta table {path} cannot be rebuilt: Spark reported "
        f"{definite}, which a repetition would raise again. If its owner has "
        "altered the table, such as by a constraint that rows of the source violate, undo the "
        "alteration."
    )


def unwritable_error(path: str, error: Exception) -> PgcdcError:
    """Return the error of a rebuild that could not write to the lake."""
    return explain_store_error(path, error) or TransientError(
        reason=f"The Delta table {path} cannot be written, and is unchanged: "
        f"{first_sentence(error)} Check that the lake has space and is writable, then run it again."
    )
