"""Data files and commits of small tables, without Spark.

A commit is the version directly after the one that the step was computed from, or it fails. It
carries the fence and the watermark (`tables/fence.py`), so a merge by Spark at the same time
conflicts with it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pyspark
from deltalake import CommitProperties, Schema
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction

from pgcdc_assets import failpoints
from pgcdc_assets.merge.batch import kept_rows
from pgcdc_assets.merge.batch.column_types import arrow_schema
from pgcdc_assets.merge.batch.contents import Contents
from pgcdc_assets.merge.batch.spark_fallback import CommitConflict, NotInScope
from pgcdc_assets.merge.fold.table_schema import TableSchema
from pgcdc_assets.merge.write import table_properties
from pgcdc_assets.raw.delta.files import filesystem
from pgcdc_assets.raw.delta.log_entries import FOLDER, commit_path
from pgcdc_assets.raw.delta.refused_commits import is_full_disk
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.tables.checkpoints import WITHOUT_UPKEEP, keep_checkpoints
from pgcdc_assets.tables.columns import IS_CURRENT, SCD2_COLUMNS
from pgcdc_assets.tables.fence import Step, fence_transactions
from pgcdc_assets.tables.own_commits import following
from pgcdc_assets.tables.properties import BEGINS_WITH
from pgcdc_assets.tables.source_columns import SOURCE
from pgcdc_assets.tables.state import ScdState, is_written

_FEATURES = ("appendOnly", "deletionVectors", "invariants")
_ENGINE = "pgcdc_assets"

# The column that a history is partitioned by, and its values in the form of Delta's log.
_TRUE, _FALSE = "true", "false"

# The bound of a table's rows in memory. The log has their compressed size only.
MOST_ROW_BYTES = 64 * 1024 * 1024
# Of rows that are decoded at once. A value in a dictionary of a Parquet file has up to 1 MB.
_BATCH_ROWS = 1024

# Spark reads dates before 1582 by the calendar of the version that wrote the file: without one, by
# its setting `spark.sql.parquet.datetimeRebaseModeInRead`, which refuses or shifts them.
_FILE_METADATA = {"org.apache.spark.version": pyspark.__version__}
# The marks of a file with days of the calendar before 1582, as Spark 2 wrote them.
_LEGACY = frozenset({b"org.apache.spark.legacyDateTime", b"org.apache.spark.legacyINT96"})


def read_stored_rows(zone: RawZone, state: ScdState, schema: TableSchema) -> pa.Table:
    """Read a table's rows, of a history the current versions, with the columns of a schema.

    Raises:
        NotInScope: the rows exceed `MOST_ROW_BYTES`, or only Spark reads their dates.
        OSError, pa.ArrowException: a file cannot be read.
    """
    target = arrow_schema(schema)
    # A file has no values of the column that a history is partitioned by.
    constants = {IS_CURRENT: True} if schema.system is SCD2_COLUMNS else {}
    files = filesystem(zone.lake, state.path)
    tables = []
    size = 0
    for path in state.current_files.column("path").to_pylist():
        found = kept_rows.KEPT_ROWS.pop(_address(state.path, path))
        if found is None:
            found = _read_file(files, path, MOST_ROW_BYTES - size)
        size += found.nbytes
        if size > MOST_ROW_BYTES:
            raise _too_large()
        columns = [
            found.column(field.name).cast(field.type)
            if field.name in found.column_names
            else pa.repeat(pa.scalar(constants.get(field.name), field.type), found.num_rows)
            for field in target
        ]
        tables.append(pa.table(columns, schema=target))
    return pa.concat_tables(tables) if tables else target.empty_table()


def _read_file(files: pafs.FileSystem, path: str, most_bytes: int) -> pa.Table:
    """Read a data file, unless its rows have more bytes in memory.

    Raises:
        NotInScope: they have, or only Spark reads its dates.
    """
    batches, size = [], 0
    with files.open_input_file(path) as source:
        # Another session of Spark may write timestamps as INT96, in nanoseconds by default.
        file = pq.ParquetFile(source, coerce_int96_timestamp_unit="us")
        if not _LEGACY.isdisjoint(file.metadata.metadata or ()):
            raise NotInScope("its dates are written by the old calendar")
        groups = (file.metadata.row_group(i) for i in range(file.num_row_groups))
        if sum(group.total_byte_size for group in groups) > most_bytes:
            raise _too_large()
        for batch in file.iter_batches(_BATCH_ROWS, use_threads=False):
            size += batch.nbytes
            if size > most_bytes:
                raise _too_large()
            batches.append(batch)
        return pa.Table.from_batches(batches, file.schema_arrow)


def _address(path: str, file: str) -> str:
    return f"{path}/{file}"


def _too_large() -> NotInScope:
    return NotInScope(f"its rows have more than {MOST_ROW_BYTES:,} bytes in memory")


def replace_rows(zone: RawZone, state: ScdState, contents: Contents, step: Step) -> None:
    """Replace all rows of a table, of a history the current versions, and add ended versions.

    Raises:
        CommitConflict: another writer has committed.
        DeltaError, OSError: the table cannot be written.
    """
    added = _write_files(zone, state.path, contents)
    failpoints.reach(failpoints.BEFORE_BATCH_COMMIT)
    with following(zone, state, step) as is_current:
        if not is_current:
            _discard(zone, state.path, added)
            raise CommitConflict
        _commit(zone, state, added, step, is_history=contents.ended is not None)
        keep_checkpoints(zone.lake, state.path, state.table)


def _commit(
    zone: RawZone, state: ScdState, added: Sequence[AddAction], step: Step, *, is_history: bool
) -> None:
    assert step.position is not None
    try:
        state.table.create_write_transaction(
            list(added),
            "overwrite",
            state.table.schema(),
            [IS_CURRENT] if is_history else None,
            [(IS_CURRENT, "=", _TRUE)] if is_history else None,
            commit_properties=CommitProperties(
                custom_metadata={"userMetadata": step.metadata},
                app_transactions=fence_transactions(zone, *step.position, step.number),
                max_commit_retries=0,
            ),
            post_commithook_properties=WITHOUT_UPKEEP,
        )
    except (DeltaError, OSError) as error:
        # If the answer to a conditional PUT, or to a hard link over NFS, is lost, delta-rs finds
        # its own log entry and takes the entry for the commit of another process. The files of such
        # a commit must stay.
        if not is_written(zone, state.path, step):
            is_conflict = isinstance(error, CommitFailedError)
            if is_conflict or is_full_disk(error):
                _discard(zone, state.path, added)
            if not is_conflict:
                raise
            raise CommitConflict from error


def create_table(
    zone: RawZone,
    path: str,
    schema: TableSchema,
    contents: Contents,
    step: Step,
    begins_with: str | None,
) -> None:
    """Create a table with rows, in one commit. The lake is local.

    delta-rs refuses to create a table with properties that it does not know, so the commit is
    written here. A hard link makes it visible, which fails if there is a commit.

    Args:
        begins_with: as in `write.create_or_replace`.

    Raises:
        CommitConflict: there is a table.
        OSError: the table cannot be written.
    """
    log = Path(path, FOLDER)
    log.mkdir(parents=True, exist_ok=True)
    added = _write_files(zone, path, contents)
    properties = table_properties(schema)
    if begins_with is not None:
        properties[BEGINS_WITH] = begins_with
    metadata = _metadata(schema, properties, is_history=contents.ended is not None)
    text = "\n".join(map(json.dumps, _actions(zone, schema, metadata, added, step)))
    prepared = log / f".{uuid4()}.tmp"
    try:
        failpoints.reach(failpoints.BEFORE_BATCH_COMMIT)
        prepared.write_text(text, encoding="utf-8")
        os.link(prepared, Path(path, commit_path(0)))
    except OSError as error:
        # NFS repeats a link whose answer is lost, and then finds the own commit.
        if not is_written(zone, path, step):
            _discard(zone, path, added)
            if not isinstance(error, FileExistsError):
                raise
            raise CommitConflict from error
    finally:
        prepared.unlink(missing_ok=True)


def _metadata(
    schema: TableSchema, properties: Mapping[str, str], *, is_history: bool
) -> dict[str, Any]:
    """Return the action that describes a new table."""
    metadata: dict[str, Any] = {
        "id": str(uuid4()),
        "format": {"provider": "parquet", "options": {}},
        "schemaString": _schema_text(schema),
        "partitionColumns": [IS_CURRENT] if is_history else [],
        "configuration": properties,
        "createdTime": int(time.time() * 1000),
    }
    if schema.description:
        metadata["description"] = schema.description
    return metadata


def _actions(
    zone: RawZone,
    schema: TableSchema,
    metadata: Mapping[str, Any],
    added: Sequence[AddAction],
    step: Step,
) -> list[dict[str, Any]]:
    """Return the actions of the first commit of a table."""
    assert step.position is not None
    now = int(time.time() * 1000)
    kinds = {field.type.ddl for field in schema.fields}
    ntz = ["timestampNtz"] if any("TIMESTAMP_NTZ" in ddl for ddl in kinds) else []
    return [
        {
            "commitInfo": {
                "timestamp": now,
                "operation": "CREATE TABLE AS SELECT",
                "operationParameters": {},
                "isBlindAppend": True,
                "userMetadata": step.metadata,
                "engineInfo": _ENGINE,
            }
        },
        {
            "protocol": {
                "minReaderVersion": 3,
                "minWriterVersion": 7,
                "readerFeatures": ["deletionVectors", *ntz],
                "writerFeatures": [*_FEATURES, *ntz],
            }
        },
        {"metaData": metadata},
        *(
            {"txn": {"appId": each.app_id, "version": each.version, "lastUpdated": now}}
            for each in fence_transactions(zone, *step.position, step.number)
        ),
        *(
            {
                "add": {
                    "path": file.path,
                    "partitionValues": file.partition_values,
                    "size": file.size,
                    "modificationTime": now,
                    "dataChange": True,
                    "stats": file.stats,
                }
            }
            for file in added
        ),
    ]


def _schema_text(schema: TableSchema) -> str:
    """Return the schema in the form of Delta's log, with comments and the source's columns."""
    text = json.loads(Schema.from_arrow(arrow_schema(schema)).to_json())
    described = [{"comment": f.comment, SOURCE: f.source} for f in schema.fields]
    described += [{"comment": comment, SOURCE: None} for _, _, comment in schema.system]
    for column, metadata in zip(text["fields"], described, strict=True):
        column["metadata"] = {name: value for name, value in metadata.items() if value is not None}
    return json.dumps(text)


def _write_files(zone: RawZone, path: str, contents: Contents) -> list[AddAction]:
    """Write the data files; none without rows."""
    if contents.ended is None:
        return _write_file(zone, path, contents.rows)
    current = contents.rows.drop_columns([IS_CURRENT])
    ended = contents.ended.drop_columns([IS_CURRENT])
    written = _write_file(zone, path, current, _TRUE)
    try:
        return written + _write_file(zone, path, ended, _FALSE)
    except OSError:
        _discard(zone, path, written)
        raise


def _write_file(
    zone: RawZone, path: str, rows: pa.Table, is_current: str | None = None
) -> list[AddAction]:
    """Write a data file; none without rows.

    Args:
        is_current: of all rows, in the form of Delta's log; None for a table without history.
    """
    if rows.num_rows == 0:
        return []
    files, folder = filesystem(zone.lake, path), ""
    if is_current is not None:
        folder = f"{IS_CURRENT}={is_current}/"
        if zone.lake.is_local:
            files.create_dir(folder, recursive=True)
    name = f"{folder}part-00000-{uuid4()}-c000.snappy.parquet"
    # Statistics ignore NaN, which Spark takes for the greatest value, and a dictionary has 0 or -0.
    exact = [
        column.name
        for column in rows.schema
        if not pa.types.is_floating(column.type) and not pa.types.is_nested(column.type)
    ]
    try:
        with files.open_output_stream(name) as target:
            with pq.ParquetWriter(
                target,
                rows.schema,
                compression="snappy",
                version="2.6",
                store_schema=False,
                use_dictionary=exact,
                write_statistics=exact,
            ) as writer:
                writer.write_table(rows)
                writer.add_key_value_metadata(_FILE_METADATA)
            size = target.tell()
    except OSError:
        # A part of a file, as after a full disk.
        with suppress(OSError):
            files.delete_file(name)
        raise
    if is_current != _FALSE:
        kept_rows.KEPT_ROWS.keep(_address(path, name), rows)
    values = {} if is_current is None else {IS_CURRENT: is_current}
    return [AddAction(name, size, values, int(time.time() * 1000), True, _statistics(rows))]


def _statistics(rows: pa.Table) -> str:
    """Return Delta's statistics of a file: ranges of whole numbers, and counts of NULLs."""
    least, most = {}, {}
    for column in rows.schema:
        if pa.types.is_integer(column.type):
            found = pc.min_max(rows.column(column.name)).as_py()
            if found["min"] is not None:
                least[column.name], most[column.name] = found["min"], found["max"]
    return json.dumps(
        {
            "numRecords": rows.num_rows,
            "minValues": least,
            "maxValues": most,
            "nullCount": {name: rows.column(name).null_count for name in rows.column_names},
        }
    )


def _discard(zone: RawZone, path: str, added: Sequence[AddAction]) -> None:
    for file in added:
        kept_rows.KEPT_ROWS.pop(_address(path, file.path))
        with suppress(OSError):
            filesystem(zone.lake, path).delete_file(file.path)
