"""Relations from the catalog, with all that pgoutput's Relation message does not contain.

Sources: Postgres documentation, chapter 51 System Catalogs (pg_class, pg_attribute, pg_index).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pgcdc_assets.postgres.catalog.publication import (
    read_members,
    read_publication,
    read_row_filters,
)
from pgcdc_assets.postgres.catalog.types import ResolvedType, resolve_types
from pgcdc_assets.protocol.relation import Column, Relation, ReplicaIdentity
from pgcdc_assets.table_name import TableName

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

# The columns of the replica identity, by the rule of RelationGetIndexList() in
# src/backend/utils/cache/relcache.c: the index is valid and not deferrable. A deferrable primary
# key is a primary key, but no replica identity.
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
                    and k.position <= i.indnkeyatts), '{}'),
       c.relnatts, c.relkind = 'p'
  from pg_class c
  join pg_namespace n on n.oid = c.relnamespace
 where c.oid = any(%s::bigint[]::oid[])
"""

# attmissingval is an array of one element. The delimiter of the element's type may be another one
# than that of text: array_out() leaves the commas of `{(1,1),(0,0)}`, a box, without quotes.
_MISSING = """(
         select case when left(t, 2) = '{{"' or t = '{{NULL}}' then (t::text[])[1]
                     else substr(t, 2, length(t) - 2) end
           from (select {column}.attmissingval::text) m(t))"""

# Of a partitioned table, only its partitions have attmissingval. The function pg_partition_tree()
# is unsuitable, because it waits for the locks of VACUUM FULL.
_COLUMNS = f"""
with recursive part(root, oid) as (
    select c.oid, c.oid
      from pg_class c where c.oid = any(%(oids)s::bigint[]::oid[]) and c.relkind = 'p'
    union select p.root, i.inhrelid from part p join pg_inherits i on i.inhparent = p.oid
)
select a.attrelid::bigint, a.attname, a.atttypid::bigint, a.atttypmod, a.attnum,
       a.attgenerated::text, case c.relkind when 'p' then (
         select min({_MISSING.format(column="l")})
           from part p
           join pg_class leaf on leaf.oid = p.oid and leaf.relkind <> 'p'
           join pg_attribute l on l.attrelid = p.oid and l.attname = a.attname
          where p.root = c.oid and not l.attisdropped
         having count(distinct {_MISSING.format(column="l")}) = 1)
       else {_MISSING.format(column="a")} end,
       a.atthasdef, a.attnotnull, a.attidentity::text
  from pg_attribute a join pg_class c on c.oid = a.attrelid
 where a.attrelid = any(%(oids)s::bigint[]::oid[]) and a.attnum > 0 and not a.attisdropped
 order by a.attrelid, a.attnum
"""


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """A relation with the columns that a publication sends, and the facts that a copy needs.

    Attributes:
        relation: the relation with the published columns.
        row_filter: SQL text of the publication's WHERE clause; None without a row filter.
        publication: the publication's name.
        declared: the declared name of a table that was renamed since; None: the relation's name.
    """

    relation: Relation
    row_filter: str | None = None
    publication: str = ""
    declared: TableName | None = None

    @property
    def is_partitioned(self) -> bool:
        """The rows are in partitions. Otherwise a copy reads ONLY the table itself."""
        return self.relation.is_partitioned

    @property
    def declared_name(self) -> TableName:
        """The name under which the lake has the table."""
        return self.declared or self.relation.name


def published_tables(
    conn: Connection, publication: str, *, has_filters: bool = True
) -> list[PublishedTable]:
    """Return a publication's tables with the published columns, ordered by schema and name.

    Args:
        conn: a connection to the source database.
        publication: the publication's name.
        has_filters: read the row filters, and wait for the locks of the tables that have one.

    Raises:
        ConfigurationError: the publication does not exist.
    """
    relations = _read_published(conn, publication)
    row_filters = read_row_filters(conn, publication) if has_filters else {}
    return [
        PublishedTable(relation, row_filters.get(oid), publication)
        for oid, relation in relations.items()
    ]


def published_relations(conn: Connection, publication: str) -> list[Relation]:
    """Return a publication's relations with the published columns. The call waits for no lock.

    Raises:
        ConfigurationError: the publication does not exist.
    """
    return list(_read_published(conn, publication).values())


def _read_published(conn: Connection, publication: str) -> dict[int, Relation]:
    """Return the relations by OID, in the order of schema and name."""
    read_publication(conn, publication)
    members = read_members(conn, publication)
    columns = {member.relation_id: member.columns for member in members}
    # Before PG 18 pgoutput does not send generated columns, although a column list may have them.
    sends_generated = conn.server_version >= 180000

    def is_sent(relation_id: int, name: str, generated: str) -> bool:
        listed = columns[relation_id]
        return (listed is None or name in listed) and (sends_generated or not generated)

    relations = read_relations(conn, columns, is_sent)
    return {oid: relations[oid] for oid in columns if oid in relations}


def read_relations(
    conn: Connection,
    relation_ids: Iterable[int],
    is_kept: Callable[[int, str, str], bool] = lambda relation_id, name, generated: True,
    *,
    with_types: bool = True,
) -> dict[int, Relation]:
    """Return the existing relations by OID.

    Args:
        conn: a connection to the source database.
        relation_ids: OIDs of relations; unknown OIDs are ignored.
        is_kept: function of OID, column name and `attgenerated` that selects columns; the default
            selects all columns.
        with_types: read the base and element types of the columns, by one more query.
    """
    wanted = sorted(set(relation_ids))
    with conn.cursor() as cursor:
        cursor.execute(_RELATIONS, (wanted,))
        heads = cursor.fetchall()
        cursor.execute(_COLUMNS, {"oids": wanted})
        attributes: dict[int, list[tuple[Any, ...]]] = {}
        for owner, *attribute in cursor:
            attributes.setdefault(owner, []).append(tuple(attribute))
    oids = {one[1] for own in attributes.values() for one in own}
    types = resolve_types(conn, oids) if with_types else {}
    relations: dict[int, Relation] = {}
    for oid, schema, table, identity, identity_attnums, primary_key, count, is_root in heads:
        kept: list[Column] = []
        unsent: list[str] = []
        for name, type_oid, typmod, attnum, generated, *facts in attributes.get(oid, ()):
            if not is_kept(oid, name, generated):
                unsent += [name] if attnum in identity_attnums else []
                continue
            missing, has_default, not_null, column_identity = facts
            column = Column(
                name,
                type_oid,
                typmod,
                is_key=identity == ReplicaIdentity.FULL or attnum in identity_attnums,
                attnum=attnum,
                missing=missing,
                has_default=has_default,
                not_null=not_null,
                generated=generated,
                identity=column_identity,
            )
            kept.append(complete_type(column, types))
        relations[oid] = Relation(
            oid,
            schema,
            table,
            ReplicaIdentity(identity),
            tuple(kept),
            tuple(primary_key),
            attribute_count=count,
            is_partitioned=is_root,
            unsent_identity=tuple(unsent),
        )
    return relations


def complete_type(column: Column, types: Mapping[int, ResolvedType]) -> Column:
    """Return the column with its type fields filled in, if its type is resolved."""
    resolved = types.get(column.type_oid)
    return column if resolved is None else resolved.complete(column)
