"""Where SCD tables lie and how far they are, read by delta-rs without a JVM.

A table's watermark is the version of the application transaction `pgcdc:{name}:{epoch}` in its own
log, so it is committed with the rows it speaks of, or not at all. It is one per epoch: LSNs of
different epochs do not compare.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError

from pgcdc_assets.errors import ConfigurationError, TransientError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.raw.files import filesystem
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone

# The property of a table that is never replaced by a copy: the position of its first one.
BEGINS_WITH = "pgcdc.begins_with"

# Commits of others, such as an OPTIMIZE, may follow one's own before it is looked for.
_LAST_COMMITS = 100
_NULL_RESCUED = "null_count._rescued"

_PLAIN = re.compile(r"[A-Za-z0-9_$-][A-Za-z0-9_.$-]*")


def table_path(
    lake: Lake, name: str, schema: str, table: str, scd: int, root: str | None = None
) -> str:
    """Give the address of an SCD table.

    Args:
        root: the address that takes the place of the capture's folder in the lake.
    """
    place = f"scd{scd}", _folder(schema), _folder(table)
    return lake.path(name, *place) if root is None else "/".join((root.rstrip("/"), *place))


def read_watermark(
    lake: Lake, name: str, schema: str, table: str, scd: int
) -> tuple[int, Lsn] | None:
    """Say through which LSN of which epoch a table is folded; None before its first merge."""
    state = read_target(lake, name, table_path(lake, name, schema, table, scd))
    return None if state is None else state.watermark


@dataclass(frozen=True)
class TargetState:
    """An SCD table as its log describes it.

    Attributes:
        watermark: epoch and LSN; None for a table that holds nothing of ours yet.
        columns: names in order.
        schema: as Delta writes it, and Spark reads it: in JSON.
        row_count: rows; None where a file has no statistics.
        has_deletion_vectors: some rows of the files are marked as deleted.
        files: as delta-rs lists them, flattened.
    """

    path: str
    watermark: tuple[int, Lsn] | None
    properties: Mapping[str, str]
    columns: tuple[str, ...]
    schema: str = field(repr=False)
    row_count: int | None
    has_deletion_vectors: bool
    files: pa.Table = field(compare=False, repr=False)

    @property
    def is_empty(self) -> bool:
        """Whether it has no rows, not even deleted ones."""
        return _written_rows(self.files) == 0

    @property
    def size_bytes(self) -> int:
        """The size of all files."""
        return int(pc.sum(self.files.column("size_bytes")).as_py() or 0)

    @property
    def rescued(self) -> dict[str, int | None]:
        """Per file how many of its rows have a rescued value; None where statistics do not say."""
        return _rescued_rows(self.files)


def read_target(lake: Lake, name: str, path: str) -> TargetState | None:
    """Read a table's state; None when it does not exist."""
    table = open_table(lake, path)
    if table is None:
        return None
    files = pa.table(table.get_add_actions(flatten=True))
    vectors = pa.table(table.deletion_vectors())
    return TargetState(
        path=path,
        watermark=_watermark(table, lake, name),
        properties=table.metadata().configuration,
        columns=tuple(field.name for field in table.schema().fields),
        schema=table.schema().to_json(),
        row_count=_row_count(_written_rows(files), vectors),
        has_deletion_vectors=vectors.num_rows > 0,
        files=files,
    )


def check_unmoved(lake: Lake, path: str, app_id: str, before: Lsn | None) -> None:
    """See that a table is still folded through the LSN that a merge began with.

    Raises:
        TransientError: another merge was faster.
    """
    table = open_table(lake, path)
    if table is None or not _stands_at(table, app_id, before):
        raise _overtaken(path)


def check_committed(lake: Lake, path: str, mark: str) -> None:
    """See that the commit with a mark (`userMetadata`) is there.

    Delta leaves a write out, and says nothing, when the table has its application transaction.

    Raises:
        TransientError: it is not among the last commits: another merge was faster.
    """
    table = open_table(lake, path)
    newest = table.version() if table is not None else -1
    log = filesystem(lake, path)
    # Not by `DeltaTable.history`: it refuses the statistics of a CLONE.
    for version in range(newest, max(-1, newest - _LAST_COMMITS), -1):
        try:
            with log.open_input_stream(f"_delta_log/{version:020d}.json") as entry:
                actions = [json.loads(line) for line in entry.read().splitlines() if line.strip()]
        except FileNotFoundError:
            break
        if any(action.get("commitInfo", {}).get("userMetadata") == mark for action in actions):
            return
    raise _overtaken(path)


def advance_watermark(
    lake: Lake, path: str, app_id: str, before: Lsn | None, watermark: Lsn
) -> None:
    """Record that a table without changes is folded further: one commit without rows.

    Args:
        before: the watermark from which there were no changes. A table that stands elsewhere by now
            (another merge was faster, a rebuild took it back) is left as it is.

    Raises:
        TransientError: the log cannot be written.
    """
    table = open_table(lake, path)
    if table is None or not _stands_at(table, app_id, before):
        return
    try:
        table.create_write_transaction(
            [],
            "append",
            table.schema(),
            commit_properties=CommitProperties(
                app_transactions=[Transaction(app_id, int(watermark))]
            ),
        )
    except CommitFailedError:
        # Another merge of the table moved the watermark; it knows better.
        return
    except (DeltaError, OSError) as error:
        raise TransientError(
            reason=f"The Delta table {path} cannot be written ({type(error).__name__}); "
            "run it again."
        ) from error


def _overtaken(path: str) -> TransientError:
    return TransientError(
        reason=f"The Delta table {path} was merged by somebody else meanwhile, and nothing was "
        "written to it. Run it again: it goes on from there."
    )


def _stands_at(table: DeltaTable, app_id: str, watermark: Lsn | None) -> bool:
    version: int | None = table.transaction_version(app_id)
    return version == (watermark and int(watermark))


def open_table(lake: Lake, path: str) -> DeltaTable | None:
    """Open an SCD table; None when it does not exist.

    Raises:
        ConfigurationError: its log cannot be read.
    """
    try:
        return DeltaTable(path, storage_options=dict(lake.storage_options) or None)
    except TableNotFoundError:
        return None
    except (DeltaError, OSError) as error:
        raise ConfigurationError(
            reason=f"The Delta table {path} cannot be read ({type(error).__name__}). Mend it, or "
            "move it away and copy the table again."
        ) from error


def _watermark(table: DeltaTable, lake: Lake, name: str) -> tuple[int, Lsn] | None:
    zone = RawZone(lake, name)
    newest = zone.epochs.latest()
    for epoch in range(newest.epoch if newest else 1, 0, -1):
        version = table.transaction_version(zone.app_id(epoch))
        if version is not None:
            return epoch, Lsn(version)
    return None


def _written_rows(files: pa.Table) -> int | None:
    """Count the rows of the files, with those that deletion vectors hide."""
    counts = files.column("num_records")
    return None if counts.null_count else int(pc.sum(counts).as_py() or 0)


def _rescued_rows(files: pa.Table) -> dict[str, int | None]:
    paths = files.column("path").to_pylist()
    if _NULL_RESCUED not in files.column_names:
        return dict.fromkeys(paths)
    counts = pc.subtract(files.column("num_records"), files.column(_NULL_RESCUED))
    return dict(zip(paths, counts.to_pylist(), strict=True))


def _row_count(written: int | None, vectors: pa.Table) -> int | None:
    if not written:
        return written
    kept = vectors.column("selection_vector").combine_chunks()
    hidden = pc.sum(pc.invert(pc.list_flatten(kept))).as_py()
    return written - int(hidden or 0)


def _folder(name: str) -> str:
    """Make a folder's name of a Postgres name: the name itself, or its odd characters as ~hex.

    Slashes would nest, and engines disagree about percent signs, blanks and glob characters in
    paths.
    """
    if _PLAIN.fullmatch(name):
        return name
    head = "".join(
        c if c.isascii() and (c.isalnum() or c in "_$-.") else f"~{ord(c):x}~" for c in name
    )
    return f"~2e~{head[1:]}" if head.startswith(".") else head
