"""The rows of a Delta table that deletion vectors remove, counted by file.

delta-rs returns a vector of one boolean for each row of a file, which it reads from the store. The
log has the count of each vector (`cardinality`, "Deletion Vectors" in Delta's PROTOCOL.md), so the
count of a large table is read from the log alone: neither time nor memory grows with its rows. For
a small table, delta-rs is faster, because it has read the log already.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from deltalake import DeltaTable

from pgcdc_assets.raw.delta.files import filesystem
from pgcdc_assets.raw.delta.log_entries import FOLDER, hinted_checkpoint, read_commit_lines
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.tables.row_counts import written_rows

# The vectors of fewer rows need little time and memory.
SMALL_TABLE_ROWS = 1_000_000

_FEATURE = "deletionVectors"
# delta-rs may not read the vectors of a table with other features, such as type widening.
_READ = frozenset({_FEATURE, "columnMapping", "timestampNtz", "v2Checkpoint", "variantType"})
# A checkpoint of a table with this feature may have its adds in other files.
_SIDECARS = "v2Checkpoint"
# A single file, a part, or a file with an id.
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint\.")
_ADD = b'{"add"'


def deleted_rows(lake: Lake, path: str, table: DeltaTable, files: pa.Table) -> dict[str, int]:
    """Count the rows that deletion vectors remove from the files of a version.

    Args:
        path: the table's folder.
        table: the version.
        files: the add actions of the version from delta-rs, flattened.

    Returns:
        The counts by name of file, for files with a deletion vector.

    Raises:
        DeltaError, OSError, ValueError, pa.ArrowException: the log or a vector cannot be read.
    """
    features = frozenset(table.protocol().reader_features or ())
    if _FEATURE not in features:
        return {}
    written = written_rows(files)
    if written is None or written > SMALL_TABLE_ROWS or not features <= _READ:
        found = _read_log(filesystem(lake, path), table, files)
        if found is not None:
            return found
    return _read_vectors(table)


def file_name(path: str) -> str:
    """Return the name of a file, which is unique in a table."""
    return path.rpartition("/")[2]


def _read_log(store: pafs.FileSystem, table: DeltaTable, files: pa.Table) -> dict[str, int] | None:
    """Read the counts from a checkpoint and the commits after it.

    Delta reads `_last_checkpoint` as a hint, which may be lost, stale or truncated. In this case,
    the checkpoints are listed.

    Returns:
        The counts; None if the newest checkpoint is not a single file, or the log cannot be read.
    """
    if _SIDECARS in (table.protocol().reader_features or ()):
        return None
    for find in (_find_hinted_checkpoint, _find_listed_checkpoint):
        # The hint is wrong, or the daily job has removed a file since it was listed.
        with suppress(FileNotFoundError, ValueError):
            covered = find(store, table.version())
            if covered is not None:
                return _count(store, covered, table.version(), files)
    return None


def _find_hinted_checkpoint(store: pafs.FileSystem, version: int) -> int | None:
    """Return the version of the checkpoint that `_last_checkpoint` names.

    Returns:
        None if the hint has no version, or a version after the table's.

    Raises:
        FileNotFoundError, ValueError: the hint is lost or malformed.
    """
    covered = hinted_checkpoint(store)
    return covered if covered is not None and covered <= version else None


def _find_listed_checkpoint(store: pafs.FileSystem, version: int) -> int | None:
    """Return the version of the newest checkpoint up to a version, or -1 if there is none.

    Returns:
        None if the checkpoint is not a single file.
    """
    names = {info.base_name for info in store.get_file_info(pafs.FileSelector(FOLDER))}
    versions = [int(match[1]) for match in map(_CHECKPOINT.match, names) if match]
    newest = max((each for each in versions if each <= version), default=-1)
    return newest if newest < 0 or _checkpoint_name(newest) in names else None


def _count(store: pafs.FileSystem, covered: int, version: int, files: pa.Table) -> dict[str, int]:
    """Read the counts of the live files from a checkpoint and the commits after it.

    Args:
        covered: version of the checkpoint; -1 without a checkpoint.
        version: version of the table.
    """
    counts = {} if covered < 0 else _read_checkpoint(store, covered)
    for number in range(covered + 1, version + 1):
        for line in read_commit_lines(store, number):
            if line.startswith(_ADD):
                add = json.loads(line)["add"]
                vector = add.get("deletionVector") or {}
                counts[file_name(add["path"])] = vector.get("cardinality", 0)
    live = map(file_name, files.column("path").to_pylist())
    return {name: count for name in live if (count := counts.get(name, 0))}


def _checkpoint_name(version: int) -> str:
    return f"{version:020d}.checkpoint.parquet"


def _read_checkpoint(store: pafs.FileSystem, version: int) -> dict[str, int]:
    columns = ["add.path", "add.deletionVector.cardinality"]
    with store.open_input_file(f"{FOLDER}/{_checkpoint_name(version)}") as file:
        # Not `read_table`, which would return the two fields without their structs.
        adds = pq.ParquetFile(file).read(columns).column("add").combine_chunks()
    if "deletionVector" not in {field.name for field in adds.type}:
        return {}
    counts = pc.struct_field(adds, ["deletionVector", "cardinality"])
    has_vector = pc.is_valid(counts)
    paths = pc.struct_field(adds, "path").filter(has_vector).to_pylist()
    return dict(zip(map(file_name, paths), counts.filter(has_vector).to_pylist(), strict=True))


def _read_vectors(table: DeltaTable) -> dict[str, int]:
    vectors = pa.table(table.deletion_vectors())
    names = [file_name(path) for path in vectors.column("filepath").to_pylist()]
    kept = vectors.column("selection_vector").combine_chunks()
    of_deleted = pc.list_parent_indices(kept).filter(pc.invert(pc.list_flatten(kept)))
    return {
        names[entry["values"]]: entry["counts"] for entry in pc.value_counts(of_deleted).to_pylist()
    }
