"""The lock on a table during its copy, and the check that the table is as in its snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from psycopg2 import sql

from pgcdc_assets.errors import TableChanged
from pgcdc_assets.postgres.catalog.publication import read_memberships
from pgcdc_assets.postgres.catalog.relations import read_relations

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

    from pgcdc_assets.protocol.relation import Column, Relation

# pg_class is read as of the snapshot, pg_relation_filenode() as of now. Different values mean a
# rewrite or a TRUNCATE after the snapshot. A rewritten table is empty in an older snapshot (13.6
# Caveats, https://www.postgresql.org/docs/current/mvcc-caveats.html).
_REWRITTEN = """
select count(*)
  from pg_class c
 where c.relkind = 'r' and c.relfilenode <> 0
   and c.relfilenode is distinct from pg_relation_filenode(c.oid)
   and (c.oid = %s::bigint::oid or c.oid in (select relid from pg_partition_tree(%s::bigint::oid)))
"""

# Read as of the snapshot and as of now: a partition that was attached or detached in between would
# be in some ranges of a copy and not in others.
_PARTITIONS = """
with recursive tree (oid) as (
  select %s::bigint::oid
   union all
  select i.inhrelid from pg_inherits i join tree on i.inhparent = tree.oid)
select array_agg(oid::bigint order by oid) from tree
"""


def lock_unchanged(
    conn: Connection,
    current: Sequence[Connection],
    relation: Relation,
    query: sql.Composable,
    publication: str = "",
) -> None:
    """Lock the table against ALTER TABLE, then check that it is unchanged since the snapshot.

    The server decodes each change with the catalog as of the change. If a table joins the
    publication after the snapshot, some changes are missing from both the copy and the stream:
    these changes commit after the snapshot and before the publication of the table.

    On a standby the lock delays the replay of an ALTER TABLE. The primary is ahead: the table must
    be unchanged there too.

    Args:
        conn: inside a transaction that reads as of the snapshot.
        current: connections in autocommit mode, which read the catalog as it is now: to the same
            server, and of a standby to its primary.

    Raises:
        TableChanged: the table or its publication was altered after the snapshot.
    """
    relation_id = relation.relation_id
    with conn.cursor() as cursor:
        # The query takes the lock with the same privileges as the copy. LOCK TABLE would require a
        # privilege on the whole table instead of the published columns.
        cursor.execute(sql.SQL("{} limit 0").format(query))
        cursor.execute(_REWRITTEN, (relation_id, relation_id))
        row = cursor.fetchone()
    if row != (0,) or any(_has_changed(conn, now, relation, publication) for now in current):
        raise TableChanged(relation=relation.qualified_name)


def _has_changed(
    conn: Connection, current: Connection, relation: Relation, publication: str
) -> bool:
    """Return whether a table or its publication differs between the snapshot and now."""
    relation_id = relation.relation_id
    then = read_relations(conn, [relation_id], with_types=False).get(relation_id)
    now = read_relations(current, [relation_id], with_types=False).get(relation_id)
    is_republished = bool(publication) and (
        read_memberships(conn, publication, [relation_id])
        != read_memberships(current, publication, [relation_id])
    )
    is_repartitioned = _partitions(conn, relation_id) != _partitions(current, relation_id)
    published = {_shape(column) for column in relation.columns}
    return (
        then is None
        or now is None
        or is_republished
        or is_repartitioned
        or (now.schema, now.table) != (relation.schema, relation.table)
        or [_shape(column) for column in then.columns] != [_shape(column) for column in now.columns]
        or not published <= {_shape(column) for column in now.columns}
    )


def _partitions(conn: Connection, relation_id: int) -> list[int]:
    with conn.cursor() as cursor:
        cursor.execute(_PARTITIONS, (relation_id,))
        row = cursor.fetchone()
    assert row is not None
    return list(row[0])


def _shape(column: Column) -> tuple[str, int | None, int, int]:
    return column.name, column.attnum, column.type_oid, column.typmod
