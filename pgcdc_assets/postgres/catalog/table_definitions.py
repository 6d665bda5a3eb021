"""The definitions of the published tables, and a digest that shows whether any has changed.

The queries read catalog tables alone. The function pg_partition_tree() would wait for the locks of
ALTER TABLE and VACUUM FULL on any of the tables.

Source: Postgres documentation, chapter 51 System Catalogs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from pgcdc_assets.postgres.catalog.publication import published_sql, read_memberships
from pgcdc_assets.postgres.catalog.relations import read_relations
from pgcdc_assets.postgres.encodings import read_legible
from pgcdc_assets.protocol.table_definition import (
    COMMENT_LENGTH,
    Partition,
    RowVersion,
    TableDefinition,
)
from pgcdc_assets.table_name import TableName

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

# The tables whose changes arrive under their own name, and the tables that were watched before.
_WATCHED = """
, watched(oid) as (
    select oid from published
    union select unnest(%(known)s::bigint[]::oid[])
)
"""

_SCHEMA_ROWS = """
    union all select 's', n.oid, 0, n.xmin
                from pg_publication_namespace n join publication p on p.oid = n.pnpubid
"""

# The tables whose row type, or an array of it, is the type of a column, or the base of a domain or
# of a range. The array type itself depends on the row type by an internal dependency.
_ROW_TYPES = """
select coalesce(nullif(t.typrelid, 0), e.typrelid)
  from pg_depend d
  join pg_type t on t.oid = d.refobjid
  left join pg_type e on e.oid = t.typelem
 where d.refclassid = 'pg_type'::regclass and d.refobjid >= 16384 and d.deptype = 'n'
   and d.classid in ('pg_class'::regclass, 'pg_type'::regclass)
"""

# Each change of a row of the catalog gives the row another `xmin`, except for the statistics that
# VACUUM and ANALYZE write in place.
_DIGEST = """
, related(oid) as (select oid from watched union select oid from tree),
rows(kind, oid, number, version) as (
    select 'c', c.oid, 0, c.xmin from pg_class c where c.oid in (select oid from related)
    union all select 'a', a.attrelid, a.attnum, a.xmin
                from pg_attribute a
               where a.attrelid in (select oid from watched) and a.attnum > 0
    union all select 'i', i.indexrelid, 0, i.xmin
                from pg_index i
               where i.indrelid in (select oid from watched)
                 and (i.indisprimary or i.indisreplident)
    union all select 'd', d.objoid, d.objsubid, d.xmin
                from pg_description d
               where d.classoid = 'pg_class'::regclass
                 and d.objoid in (select oid from watched)
    union all select 'h', h.inhrelid, h.inhseqno, h.xmin
                from pg_inherits h where h.inhrelid in (select oid from related)
    union all select 'n', n.oid, 0, n.xmin
                from pg_namespace n
               where n.oid in (select c.relnamespace from pg_class c
                                where c.oid in (select oid from watched))
    union all select 'p', p.oid, 0, p.row_version from publication p
    union all select 'r', r.oid, 0, r.xmin
                from pg_publication_rel r join publication p on p.oid = r.prpubid
    union all select 'e', e.oid, 0, e.xmin from pg_enum e
    union all select 't', a.attrelid, a.attnum, a.xmin
                from pg_attribute a
               where a.attnum > 0
                 and a.attrelid in (select c.oid from pg_class c where c.relkind = 'c'
                                    union all {row_types})
    {schema_rows}
)
select count(*) || ':' || coalesce(sum(hashtextextended(
           concat_ws(' ', kind, oid, number, version), 0)), 0)
  from rows
"""

_TABLES = """
select c.oid::bigint, c.oid in (select oid from published), c.xmin::text::bigint,
       case when not pg_is_in_recovery() then c.cmin::text::bigint end,
       coalesce(t.xmin::text::bigint, 0), c.relfilenode::bigint, c.relowner::bigint,
       c.reltoastrelid::bigint
  from watched w
  join pg_class c on c.oid = w.oid
  left join pg_type t on t.oid = c.reltype
"""

_COLUMNS = """
select a.attrelid::bigint, a.attnum, a.xmin::text::bigint,
       case when not pg_is_in_recovery() then a.cmin::text::bigint end, d.xmin::text::bigint
  from pg_attribute a
  left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
 where a.attrelid = any(%s::bigint[]::oid[]) and a.attnum > 0 and not a.attisdropped
"""

_COMMENTS = """
select objoid::bigint, objsubid, left(description, %s)
  from pg_description
 where classoid = 'pg_class'::regclass and objoid = any(%s::bigint[]::oid[])
"""

# CREATE TABLE ... PARTITION OF writes the rows of its columns with the rows of the system columns
# (-6 is TableOidAttributeNumber). ATTACH PARTITION writes the row of each column again. DETACH
# PARTITION CONCURRENTLY hides the rows of a partition before it ends (`inhdetachpending`). The rows
# of an unlogged partition are not in the WAL: such a partition counts as attached from SET LOGGED
# on, which gives the table another file than CREATE TABLE (see `unused_tables`).
#
# TRUNCATE gives the TOAST table its new file after the table, in a later command. VACUUM FULL and
# CLUSTER exchange both files in one command. They count the rows, and TRUNCATE does not: the number
# is -1 until ANALYZE. GRANT and other statements write the row of the table later, and leave the
# TOAST table's row alone.
#
# The replay of WAL sets the numbers of commands to 0, except in pages that the WAL has as a whole.
# On a standby the numbers prove nothing. After a failover or a crash, a row that neither statement
# writes in its first command has the number 0.
_PARTITIONS = """
with recursive part(root, oid, version, command) as (
    select i.inhparent, i.inhrelid, i.xmin, i.cmin::text::bigint
      from pg_inherits i join pg_class c on c.oid = i.inhrelid and c.relispartition
     where i.inhparent = any(%s::bigint[]::oid[]) and not i.inhdetachpending
    union select p.root, i.inhrelid, i.xmin, i.cmin::text::bigint
            from part p
            join pg_inherits i on i.inhparent = p.oid and not i.inhdetachpending
            join pg_class c on c.oid = i.inhrelid and c.relispartition
)
select p.root::bigint, p.oid::bigint, n.nspname, c.relname, p.version::text::bigint,
       exists (select from pg_attribute s join pg_attribute a on a.attrelid = s.attrelid
                where s.attrelid = p.oid and s.attnum = -6 and a.attnum > 0
                  and a.xmin = s.xmin and a.cmin = s.cmin and s.xmin = p.version)
         and c.relfilenode in (0, c.oid)
         and not pg_is_in_recovery()
         and p.command > 0 and (c.xmin <> p.version or c.cmin::text::bigint > 0),
       c.relfilenode::bigint,
       (select string_agg(a.attnum || ':' || a.xmin, ',' order by a.attnum)
          from pg_attribute a
         where a.attrelid = p.oid and a.attgenerated = 's' and not a.attisdropped),
       c.reltoastrelid::bigint, c.reltablespace::bigint,
       coalesce(t.xmin, c.xmin)::text::bigint,
       c.relfilenode not in (0, c.oid)
         and (c.reltuples = -1
              or coalesce(t.xmin = c.xmin and (pg_is_in_recovery() or c.cmin::text::bigint = 0
                          or t.cmin::text::bigint > c.cmin::text::bigint), false))
  from part p
  join pg_class c on c.oid = p.oid and c.relpersistence <> 'u'
  join pg_namespace n on n.oid = c.relnamespace
  left join pg_class t on t.oid = c.reltoastrelid
"""

# The types of columns, and the types inside of these types. The part `16390 version` of an enum is
# the version of the label with this OID; a composite type gives each attribute a new number, so
# `attributes version` is higher after an attribute was added and dropped.
_TYPE_TEXTS = """
with recursive used(relation, attnum, type) as (
    select a.attrelid, a.attnum, a.atttypid
      from pg_attribute a
     where a.attrelid = any(%s::bigint[]::oid[]) and a.attnum > 0 and not a.attisdropped
    union
    select u.relation, u.attnum, inner_type.oid
      from used u
      join pg_type t on t.oid = u.type
     cross join lateral (
           select t.typelem
           union select t.typbasetype
           union select a.atttypid from pg_attribute a
                  where a.attrelid = t.typrelid and a.attnum > 0 and not a.attisdropped
           union select r.rngsubtype from pg_range r where t.oid in (r.rngtypid, r.rngmultitypid)
           ) as inner_type(oid)
     where inner_type.oid >= 16384
)
select u.relation::bigint, u.attnum, u.type::text, u.type::regtype::text, label.part, label.text
  from used u
  join pg_enum e on e.enumtypid = u.type
 cross join lateral (values (e.oid::text, e.enumlabel::text),
                            (e.oid || ' version', e.xmin::text)) as label(part, text)
 union all
select u.relation::bigint, u.attnum, u.type::text, u.type::regtype::text, number.part, number.text
  from used u
  join pg_type t on t.oid = u.type and t.typtype = 'c'
  join pg_class c on c.oid = t.typrelid
 cross join lateral (
       select 'attributes', coalesce(string_agg(a.attnum::text, ',' order by a.attnum), '')
         from pg_attribute a
        where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
       union all select 'attributes version', c.relnatts::text) as number(part, text)
"""


class _TableRow(NamedTuple):
    is_published: bool
    xmin: int
    cmin: int | None
    type_version: int
    relfilenode: int
    owner: int
    toast: int


class _TypeText(NamedTuple):
    attnum: int
    type_oid: str
    name: str
    part: str
    text: str


def read_catalog_digest(conn: Connection, publication: str, known: Iterable[int]) -> str:
    """Return a digest of the catalog rows of the published tables. The call makes one round trip.

    Equal digests of two calls prove that no definition has changed in between.

    Args:
        known: OIDs of tables that are watched although the publication may not send them now.
    """
    has_schemas = conn.server_version >= 150000
    schema_rows = _SCHEMA_ROWS if has_schemas else ""
    query = _watched(conn) + _DIGEST.format(schema_rows=schema_rows, row_types=_ROW_TYPES)
    with conn.cursor() as cursor:
        cursor.execute(query, {"publication": publication, "known": sorted(known)})
        row = cursor.fetchone()
    assert row is not None
    return str(row[0])


def read_definitions(
    conn: Connection, publication: str, known: Iterable[int]
) -> dict[int, TableDefinition]:
    """Return the definitions of the published and of the known tables by OID.

    A table with a name that the server cannot convert to UTF-8 is left out. A comment and the
    labels of an enum type are left out of the table's definition.

    The queries read one after the other: the caller compares the digests from before and after.
    """
    with conn.cursor() as cursor:
        cursor.execute(
            _watched(conn) + _TABLES, {"publication": publication, "known": sorted(known)}
        )
        tables = {row[0]: _TableRow(*row[1:]) for row in cursor}

    def read(oids: Sequence[int]) -> dict[int, TableDefinition]:
        return _read_tables(conn, publication, {oid: tables[oid] for oid in oids})

    return read_legible(read, list(tables))[0]


def _read_tables(
    conn: Connection, publication: str, tables: Mapping[int, _TableRow]
) -> dict[int, TableDefinition]:
    with conn.cursor() as cursor:
        cursor.execute(_COLUMNS, (list(tables),))
        columns: dict[int, dict[int, RowVersion]] = {}
        defaults: dict[int, dict[int, int]] = {}
        for oid, attnum, xmin, cmin, of_default in cursor:
            columns.setdefault(oid, {})[attnum] = RowVersion(xmin, cmin)
            if of_default is not None:
                defaults.setdefault(oid, {})[attnum] = of_default
        cursor.execute(_PARTITIONS, (list(tables),))
        partitions: dict[int, dict[int, Partition]] = {}
        for root, oid, schema, table, *facts in cursor:
            name = str(TableName(schema, table))
            partitions.setdefault(root, {})[oid] = Partition(name, *facts)
    texts, _ = read_legible(partial(_read_type_texts, conn), list(tables))
    comments, _ = read_legible(partial(_read_comments, conn), list(tables))
    memberships = read_memberships(conn, publication, tables)
    lists = {oid: membership.column_list(oid) for oid, membership in memberships.items()}
    # Before PG 18 pgoutput does not send generated columns.
    sends_generated = conn.server_version >= 180000

    def is_sent(oid: int, name: str, generated: str) -> bool:
        listed = lists[oid]
        if listed is not None:
            return name in listed and (sends_generated or not generated)
        options = memberships[oid].publication or {}
        return not generated or generated == options.get("pubgencols")

    relations = read_relations(conn, tables, is_sent)
    found = {}
    for oid, relation in relations.items():
        row = tables[oid]
        sent = {column.attnum for column in relation.columns}
        versions = columns.get(oid, {})
        found[oid] = TableDefinition(
            relation=relation,
            is_published=row.is_published,
            membership=memberships[oid],
            attnums=frozenset(versions),
            column_versions={n: version for n, version in versions.items() if n in sent},
            default_versions=defaults.get(oid, {}),
            class_version=RowVersion(row.xmin, row.cmin),
            type_version=row.type_version,
            relfilenode=row.relfilenode,
            toast=row.toast,
            owner=row.owner,
            partitions=partitions.get(oid, {}),
            type_texts=_type_texts(text for text in texts.get(oid, ()) if text.attnum in sent),
            comments=comments.get(oid, {}),
        )
    return found


def _read_type_texts(conn: Connection, oids: Sequence[int]) -> dict[int, list[_TypeText]]:
    """Return the texts of the columns' enum and composite types by OID of the table."""
    found: dict[int, list[_TypeText]] = {}
    with conn.cursor() as cursor:
        cursor.execute(_TYPE_TEXTS, (list(oids),))
        for oid, *text in cursor:
            found.setdefault(oid, []).append(_TypeText(*text))
    return found


def _type_texts(rows: Iterable[_TypeText]) -> dict[str, dict[str, str]]:
    types: dict[str, dict[str, str]] = {}
    for row in rows:
        types.setdefault(row.type_oid, {"name": row.name})[row.part] = row.text
    return types


def _read_comments(conn: Connection, oids: Sequence[int]) -> dict[int, dict[int, str]]:
    """Return the comments of the columns by OID and attnum; attnum 0 is the table."""
    found: dict[int, dict[int, str]] = {}
    with conn.cursor() as cursor:
        cursor.execute(_COMMENTS, (COMMENT_LENGTH + 1, list(oids)))
        for oid, attnum, text in cursor:
            is_cut = len(text) > COMMENT_LENGTH
            cut = text[: COMMENT_LENGTH - 1] + "…" if is_cut else text
            found.setdefault(oid, {})[attnum] = cut
    return found


def _watched(conn: Connection) -> str:
    return published_sql(conn) + _WATCHED
