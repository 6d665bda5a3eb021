"""New files of tables and partitions whose rows were changed without a message of the stream.

ALTER TABLE, VACUUM FULL, CLUSTER and TRUNCATE give a table a new file. ALTER TABLE makes a new
TOAST table as well (`finish_heap_swap` in Postgres's src/backend/commands/cluster.c).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pgcdc_assets.error_text import first_names
from pgcdc_assets.protocol.table_definition import Partition, TableDefinition
from pgcdc_assets.raw.relations.schema_changes import SchemaChangeFound
from pgcdc_assets.raw.relations.schema_events import SchemaChange

# Number of partitions that a sentence names.
_NAMED = 3

_UNCERTAIN = (
    "ALTER TABLE wrote the table again for a column that is not sent, and hides whether rows were "
    "changed without a message of the stream."
)


def find_unlogged_tables(
    before: TableDefinition, after: TableDefinition, *, is_explained: bool
) -> Iterator[SchemaChangeFound]:
    """Find a table or partitions that may have been unlogged between two looks.

    SET UNLOGGED and SET LOGGED write the table again, as an ALTER TABLE that changes values does.
    The changes of an unlogged table are not in the WAL. A table that is in a publication by its
    name cannot be unlogged.

    An ALTER TABLE of a column that is not sent leaves no trace of the other changes, nor of a
    TRUNCATE of a partition: only a comparison with the source finds these.

    Args:
        before: the definition at the earlier look.
        after: the definition at the later look.
        is_explained: a column that is not sent explains that the table was written again.
    """
    own = after.relation.relation_id
    is_named = any(int(row["prrelid"]) == own for row in after.membership.tables)
    is_written = not is_named and _has_other_toast(before, after)
    written = [
        (now, then)
        for now, then in _common_partitions(before, after)
        if _has_other_toast(then, now)
    ]
    names = [now.name for now, then in written if now.generated == then.generated]
    if is_explained or (written and not names):
        if is_written or written:
            yield SchemaChangeFound(SchemaChange.VALUES_UNCERTAIN, (), _UNCERTAIN, False)
        return
    if is_written:
        yield _rewritten("ALTER TABLE wrote the table again, as SET UNLOGGED and SET LOGGED do.")
    if names:
        yield _rewritten(
            "ALTER TABLE wrote partitions again, as SET UNLOGGED and SET LOGGED do: "
            f"{_some(names)}."
        )


def find_truncated_partitions(
    before: TableDefinition, after: TableDefinition
) -> Iterator[SchemaChangeFound]:
    """Find partitions that were truncated on their own.

    Postgres sends TRUNCATE of the published root only, which gives all partitions another file in
    one transaction.
    """
    common = list(_common_partitions(before, after))
    have_other_files = all(now.relfilenode != then.relfilenode for now, then in common)
    if have_other_files and len({now.written_by for now, _ in common}) == 1:
        return
    names = [
        now.name
        for now, then in common
        if now.is_truncated
        and now.relfilenode != then.relfilenode
        and then.toast in (None, now.toast)
        and then.tablespace in (None, now.tablespace)
    ]
    if names:
        detail = f"Partitions were truncated, which Postgres does not send: {_some(names)}."
        yield SchemaChangeFound(SchemaChange.PARTITION_TRUNCATED, (), detail, True)


def _common_partitions(
    before: TableDefinition, after: TableDefinition
) -> Iterator[tuple[Partition, Partition]]:
    """Yield the partitions that have a file at both looks, the later one first."""
    for oid, now in after.partitions.items():
        then = before.partitions.get(oid)
        if then is not None and now.relfilenode and then.relfilenode:
            yield now, then


def _has_other_toast(then: TableDefinition | Partition, now: TableDefinition | Partition) -> bool:
    """Return whether file and TOAST table are others. A table may have had no TOAST table."""
    is_other = bool(then.toast and now.toast) and then.toast != now.toast
    return is_other and then.relfilenode != now.relfilenode


def _rewritten(detail: str) -> SchemaChangeFound:
    return SchemaChangeFound(SchemaChange.TABLE_REWRITTEN, (), detail, True)


def _some(names: Iterable[str]) -> str:
    return first_names(sorted(names), _NAMED)
