"""Data files in the folder of a table that has no log.

A process that was killed before the first commit of a table leaves data files. A table whose log
was lost has data files too. An object store has no folders, so an empty folder `_delta_log` proves
nothing. The rows of the files prove whether the table began before a snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from pgcdc_assets.lsn import Position
from pgcdc_assets.raw.delta.files import filesystem
from pgcdc_assets.raw.delta.log_entries import FOLDER
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.tables.columns import LSN, VALID_FROM_EPOCH, VALID_FROM_LSN
from pgcdc_assets.tables.read_errors import explain_read_errors


def holds_data_files(lake: Lake, path: str) -> bool:
    """Return whether a folder holds data files.

    Raises:
        TableDamaged, TransientError: the folder cannot be listed.
    """
    with explain_read_errors(path):
        return any(_data_files(filesystem(lake, path)))


def may_precede(lake: Lake, path: str, scd: int, begin: Position) -> bool:
    """Return whether data files may have rows from before a position.

    An incomplete file does not count: no commit has named it. A file without statistics of the
    system columns counts, such as a file of a table with column mapping.

    Args:
        scd: the type of the table, whose rows are never removed by later changes.

    Raises:
        TableDamaged, TransientError: a file cannot be read.
    """
    with explain_read_errors(path):
        files = filesystem(lake, path)
        return any(_file_may_precede(files, name, scd, begin) for name in _data_files(files))


def _data_files(files: pafs.FileSystem) -> Iterator[str]:
    for entry in files.get_file_info(pafs.FileSelector("", recursive=True, allow_not_found=True)):
        if entry.is_file and entry.path.endswith(".parquet") and FOLDER not in entry.path:
            yield entry.path


def _file_may_precede(files: pafs.FileSystem, name: str, scd: int, begin: Position) -> bool:
    with files.open_input_file(name) as source:
        try:
            footer = pq.ParquetFile(source).metadata
        except pa.ArrowInvalid:
            return False
    for number in range(footer.num_row_groups):
        least = _least_values(footer.row_group(number))
        if scd == 2:
            lsn, epoch = least.get(VALID_FROM_LSN), least.get(VALID_FROM_EPOCH)
        else:
            # Rows of other kinds do not have their epoch.
            lsn, epoch = least.get(LSN), 1 if begin.epoch == 1 else None
        if lsn is None or epoch is None or (epoch, lsn) < (begin.epoch, int(begin.lsn)):
            return True
    return False


def _least_values(group: pq.RowGroupMetaData) -> dict[str, int]:
    columns = map(group.column, range(group.num_columns))
    return {
        column.path_in_schema: column.statistics.min
        for column in columns
        if column.path_in_schema in (LSN, VALID_FROM_LSN, VALID_FROM_EPOCH)
        and column.statistics is not None
        and column.statistics.has_min_max
    }
