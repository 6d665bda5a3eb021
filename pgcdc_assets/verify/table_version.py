"""One version of an SCD table, which lets several queries read the same rows.

Watermarks, the row count and the number of current rows come from the table's log, without a scan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from pgcdc_assets.errors import ConfigurationError, TransientError
from pgcdc_assets.lsn import Lsn, Position
from pgcdc_assets.raw.delta.log_entries import is_own_path
from pgcdc_assets.raw.epochs import Epoch
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.spark.parquet import read_parquet
from pgcdc_assets.tables.deleted_rows import deleted_rows, file_name
from pgcdc_assets.tables.fence import read_watermarks
from pgcdc_assets.tables.properties import (
    KEY,
    KEY_SINCE,
    RELATION_ID,
    RELATION_VERSION,
    parse_key,
)
from pgcdc_assets.tables.read_errors import explain_read_errors
from pgcdc_assets.tables.state import open_table
from pgcdc_assets.verify.target import TargetVersion, read_version

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_CURRENT = "partition._is_current"

# Table features with plain Parquet files; files with deletion vectors are recognised separately.
_PLAIN_FEATURES = frozenset({"deletionVectors", "timestampNtz"})
_VARIANT = '"variant"'


@dataclass(frozen=True)
class TableVersion:
    """A version of an SCD table.

    Attributes:
        watermarks: by epoch. Every changed row of the epoch has a lower LSN; a row of a snapshot
            has at most this LSN.
        columns: names in order.
        key: names of the merge key's columns; empty for a table without a key.
        relation_id: the OID of the source table; 0 if an earlier release did not record the OID.
        relation_version: the version of the relation that the columns follow.
        size_bytes: total size of all files.
        row_count: None if the log does not have the count.
        current_count: current rows of a history; None if the log does not have the count.
        files: Parquet files with the rows; None if only Delta can read the files.
        key_since: the key of the snapshot with which the table got another key than before.
    """

    path: str
    version: int
    watermarks: Mapping[int, Lsn]
    columns: tuple[str, ...]
    key: tuple[str, ...]
    relation_id: int
    relation_version: int
    size_bytes: int
    row_count: int | None
    current_count: int | None
    files: tuple[str, ...] | None
    key_since: str | None = None

    @property
    def watermark(self) -> Position | None:
        """The newest epoch and its watermark."""
        return max((Position(*mark) for mark in self.watermarks.items()), default=None)

    def is_ordered(self, epochs: Sequence[Epoch]) -> bool:
        """Return whether LSNs alone determine the order of the rows.

        An epoch on another server may begin at a lower LSN than the end of the previous epoch.
        """
        starts = {epoch.epoch: epoch.start_lsn for epoch in epochs}
        last = -1
        for epoch, watermark in sorted(self.watermarks.items()):
            if starts[epoch] <= last:
                return False
            last = watermark
        return True


def read_table_version(
    zone: RawZone, path: str, name: str, epochs: Sequence[Epoch], version: int | None = None
) -> TableVersion:
    """Read the description of a version of an SCD table; the default is the newest version.

    Raises:
        ConfigurationError: the table was never merged, or is not an SCD table.
        TableDamaged: files of the table are missing or truncated.
    """
    table = open_merged(zone, path, name)
    with explain_read_errors(path):
        return _pin(zone, path, table, epochs, version)


def _pin(
    zone: RawZone, path: str, table: DeltaTable, epochs: Sequence[Epoch], version: int | None
) -> TableVersion:
    if version is not None:
        table.load_as_version(version)
    properties = table.metadata().configuration
    if KEY not in properties:
        raise ConfigurationError(
            reason=f"The Delta table {path} was not made by this package. Move it away."
        )
    watermarks = read_watermarks(zone, table, path, [epoch.epoch for epoch in epochs])
    files = pa.table(table.get_add_actions(flatten=True))
    hidden = deleted_rows(zone.lake, path, table, files)
    rows = _rows_by_file(files, hidden)
    current = None
    if rows is not None and _CURRENT in files.column_names:
        flags = files.column(_CURRENT).to_pylist()
        current = sum(count for count, flag in zip(rows, flags, strict=True) if flag)
    return TableVersion(
        path=path,
        version=table.version(),
        watermarks=watermarks,
        columns=tuple(field.name for field in table.schema().fields),
        key=parse_key(properties[KEY]),
        key_since=properties.get(KEY_SINCE),
        relation_id=int(properties.get(RELATION_ID, 0)),
        relation_version=int(properties.get(RELATION_VERSION, 0)),
        size_bytes=int(pc.sum(files.column("size_bytes")).as_py() or 0),
        row_count=None if rows is None else sum(rows),
        current_count=current,
        files=None if hidden else _plain_files(table, path, files),
    )


def read_pinned(session: SparkSession, pinned: TableVersion, *, is_small: bool) -> DataFrame:
    """Read the rows of the version.

    Args:
        is_small: pass the Parquet files to Spark if possible. Delta needs two Spark jobs per query
            to find the files, which costs more than to read a small table.
    """
    rows = read_version(session, TargetVersion(pinned.path, pinned.version))
    if not is_small or not pinned.files:
        return rows
    return read_parquet(session, pinned.files, rows.schema, base_path=pinned.path)


def _plain_files(table: DeltaTable, path: str, files: pa.Table) -> tuple[str, ...] | None:
    """Return the URIs of the files if their columns have the table's names and types.

    Only Delta reads files of another table, to which a shallow clone refers.
    """
    protocol = table.protocol()
    further = set(protocol.reader_features or ()) - _PLAIN_FEATURES
    # delta-rs adds the feature to a table whose properties it sets.
    if further == {"variantType"} and _VARIANT not in table.schema().to_json():
        further.clear()
    if protocol.min_reader_version == 2 or further:
        return None
    names = files.column("path").to_pylist()
    return tuple(f"{path}/{name}" for name in names) if all(map(is_own_path, names)) else None


def _rows_by_file(files: pa.Table, hidden: Mapping[str, int]) -> list[int] | None:
    """Count the rows of each file, without the rows that deletion vectors remove."""
    counts = files.column("num_records")
    if counts.null_count:
        return None
    names = map(file_name, files.column("path").to_pylist())
    return [
        count - hidden.get(name, 0) for name, count in zip(names, counts.to_pylist(), strict=True)
    ]


def open_merged(zone: RawZone, path: str, name: str, version: int | None = None) -> DeltaTable:
    """Open a version of an SCD table; the default is the newest version.

    Raises:
        ConfigurationError: the table was never merged.
        TableDamaged: the table's log cannot be read.
        TransientError: the version no longer exists.
    """
    table = open_table(zone.lake, path)
    if table is None:
        raise ConfigurationError(
            reason=f"Table {name} was never merged: there is no {path}. Run `pgcdc sync`."
        )
    if version is not None and version != table.version():
        try:
            table.load_as_version(version)
        except (DeltaError, OSError) as error:
            raise TransientError(
                reason=f"Version {version} of the Delta table {path} cannot be read "
                f"({type(error).__name__}). Run it again."
            ) from error
    return table
