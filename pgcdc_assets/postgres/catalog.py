"""The catalog's view of tables: everything about a relation that pgoutput's Relation message leaves
out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.postgres.publication import read_members, read_publication
from pgcdc_assets.postgres.type_catalog import ResolvedType, resolve_types
from pgcdc_assets.protocol.relation import Column, Relation

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

__all__ = [
    "CatalogResolver",
    "PublishedTable",
    "complete_relation",
    "published_relations",
    "published_tables",
    "read_relations",
    "resolve_types",
]

# The identity's columns as RelationGetIndexList() in relcache.c finds them: an index that is valid
# and not deferrable. A deferrable primary key is a primary key all the same, but no replica
# identity.
_RELATIONS = """
select c.oid::bigint, n.nspname, c.relname, c.relreplident::text,
       coalesce((select array_agg(k.attnum::int)
                   from pg_index i cross join unnest(i.indkey) with ordinality k(attnum, position)
                  where i.indrelid = c.oid and i.indisvalid and i.indimmediate
                    and k.position <= i.indnkeyatts
                    and case c.relreplident when 'd' then i.indisprimary
                                            when 'i' then i.indisreplident
                                            else false end), '{}'),
       coalesce((select array_agg(a.attname::text order by k.position)
                   from pg_index i
                  cross join unnest(i.indkey) with ordinality k(attnum, position)
                   join pg_attribute a on a.attrelid = c.oid and a.attnum = k.attnum
                  where i.indrelid = c.oid and i.indisprimary
                    and k.position <= i.indnkeyatts), '{}')
  from pg_class c
  join pg_namespace n on n.oid = c.relnamespace
 where c.oid = any(%s::bigint[]::oid[])
"""

_COLUMNS = """
select a.attrelid::bigint, a.attname, a.atttypid::bigint, a.atttypmod, a.attnum,
       a.attgenerated::text
  from pg_attribute a
 where a.attrelid = any(%s::bigint[]::oid[]) and a.attnum > 0 and not a.attisdropped
 order by a.attrelid, a.attnum
"""


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """A relation as the publication sends it, and what copying it needs.

    Attributes:
        is_partitioned: its rows are in partitions; else only rows of the table itself are its own.
        row_filter: SQL text of the publication's WHERE clause.
    """

    relation: Relation
    is_partitioned: bool = False
    row_filter: str | None = None


def published_tables(conn: Connection, publication: str) -> list[PublishedTable]:
    """List a publication's tables with the columns it sends, by schema and name.

    Raises:
        ConfigurationError: the publication does not exist.
    """
    read_publication(conn, publication)
    members = read_members(conn, publication)
    columns = {member.relation_id: member.columns for member in members}
    # Before PG 18 pgoutput never sends generated columns, though PG 15's view lists them.
    sends_generated = conn.server_version >= 180000

    def is_sent(relation_id: int, name: str, generated: str) -> bool:
        listed = columns[relation_id]
        return (listed is None or name in listed) and (sends_generated or not generated)

    relations = read_relations(conn, columns, is_sent)
    return [
        PublishedTable(relations[member.relation_id], member.kind == "p", member.row_filter)
        for member in members
        if member.relation_id in relations
    ]


def published_relations(conn: Connection, publication: str) -> list[Relation]:
    """List a publication's relations with the columns it sends.

    Raises:
        ConfigurationError: the publication does not exist.
    """
    return [table.relation for table in published_tables(conn, publication)]


def read_relations(
    conn: Connection,
    relation_ids: Iterable[int],
    is_kept: Callable[[int, str, str], bool] = lambda relation_id, name, generated: True,
) -> dict[int, Relation]:
    """Read relations by OID, those that exist.

    Args:
        is_kept: chooses columns by OID, name and `attgenerated`; by default all are kept.
    """
    wanted = sorted(set(relation_ids))
    with conn.cursor() as cursor:
        cursor.execute(_RELATIONS, (wanted,))
        heads = cursor.fetchall()
        cursor.execute(_COLUMNS, (wanted,))
        attributes = cursor.fetchall()
    types = resolve_types(conn, (attribute[2] for attribute in attributes))
    relations: dict[int, Relation] = {}
    for oid, schema, table, identity, identity_attnums, primary_key in heads:
        kept: list[Column] = []
        for owner, name, type_oid, typmod, attnum, generated in attributes:
            if owner != oid or not is_kept(oid, name, generated):
                continue
            is_key = identity == "f" or attnum in identity_attnums
            column = Column(name, type_oid, typmod, is_key, attnum)
            kept.append(_complete_type(column, types))
        relations[oid] = Relation(oid, schema, table, identity, tuple(kept), tuple(primary_key))
    return relations


def complete_relation(
    announced: Relation,
    catalog: Mapping[int, Relation],
    types: Mapping[int, ResolvedType] | None = None,
) -> Relation:
    """Add to an announced relation what the catalog knows.

    The catalog may be newer than the message: a backlog is read long after a change of the table.
    So the message decides names, types and keys, and a column that cannot be told for sure has no
    attnum.

    Args:
        catalog: relations by OID with all their columns.
        types: resolved types by OID, for columns whose type is not the catalog's any more.
    """
    current = catalog.get(announced.relation_id)
    known = {} if current is None else {column.name: column for column in current.columns}
    attnums = _match_attnums(announced.columns, known)
    columns = []
    for column, attnum in zip(announced.columns, attnums, strict=True):
        same = known.get(column.name)
        if same is not None and (same.type_oid, same.typmod) == (column.type_oid, column.typmod):
            columns.append(replace(same, is_key=column.is_key, attnum=attnum))
        else:
            columns.append(_complete_type(replace(column, attnum=attnum), types or {}))
    primary_key = () if current is None else current.primary_key
    if not set(primary_key) <= {column.name for column in columns}:
        primary_key = ()
    return replace(announced, columns=tuple(columns), primary_key=primary_key)


class CatalogResolver:
    """Completes the relations that a stream announces, over short connections of its own.

    A relation is announced once per stream and again after each change of it, so each announcement
    reads the catalog anew, except for the tables known at the start.
    """

    def __init__(self, settings: ConnectionSettings, publication: str) -> None:
        self._settings = settings
        self._publication = publication
        self._fresh: dict[int, Relation] | None = None

    def complete(self, announced: Relation) -> Relation:
        """Complete one announced relation.

        Raises:
            ConnectionLost: the server is down, or went away.
        """
        if self._fresh is None:
            with query_connection(self._settings, "catalog") as conn:
                members = read_members(conn, self._publication)
                self._fresh = read_relations(conn, (member.relation_id for member in members))
        current = self._fresh.pop(announced.relation_id, None)
        if current is not None:
            completed = complete_relation(announced, {announced.relation_id: current})
            if all(column.type is not None for column in completed.columns):
                return completed
        with query_connection(self._settings, "catalog") as conn:
            catalog = read_relations(conn, [announced.relation_id])
            types = resolve_types(conn, (column.type_oid for column in announced.columns))
        return complete_relation(announced, catalog, types)


def _complete_type(column: Column, types: Mapping[int, ResolvedType]) -> Column:
    resolved = types.get(column.type_oid)
    return column if resolved is None else resolved.complete(column)


def _match_attnums(announced: Sequence[Column], known: Mapping[str, Column]) -> list[int | None]:
    """Find each announced column's attnum by its name, refusing what contradicts the columns'
    order.

    Columns come in order of attnum. A name that now stands behind a later column was dropped and
    added again, and is another column than the announced one. Between two certain neighbours the
    numbers are forced when there are as many of them as columns: a renamed or dropped one keeps its
        number so.
    """
    found = [known[column.name].attnum if column.name in known else None for column in announced]
    lowest: int | None = None
    for index in range(len(found) - 1, -1, -1):
        attnum = found[index]
        if attnum is not None and lowest is not None and attnum > lowest:
            found[index] = None
        elif attnum is not None:
            lowest = attnum
    index = 0
    while index < len(found):
        if found[index] is not None:
            index += 1
            continue
        end = index
        while end < len(found) and found[end] is None:
            end += 1
        before = found[index - 1] if index else 0
        after = found[end] if end < len(found) else None
        if before is not None and after is not None and after - before - 1 == end - index:
            for position in range(index, end):
                found[position] = before + 1 + position - index
        index = end
    return found
