"""Publications: the published operations and the published tables.

The queries read catalog tables alone. The view pg_publication_tables would wait for the locks of
ALTER TABLE, VACUUM FULL and LOCK TABLE on any of its tables, and fails if one is dropped then:
one table would stop the capture of all others. The rules of membership are those of
pg_get_publication_tables() in src/backend/catalog/pg_publication.c.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pgcdc_assets.errors import UNKNOWN_CAPTURE, ConfigurationError, renewal_command
from pgcdc_assets.protocol.table_definition import Membership
from pgcdc_assets.table_name import TableName, quoted

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

_PUBLICATION = """
select puballtables, pubinsert, pubupdate, pubdelete, pubtruncate, pubviaroot
  from pg_publication where pubname = %s
"""

# `tree` has each listed table with its partitions, `published` the relations under whose names
# changes arrive. 16384 is FirstNormalObjectId.
_PUBLISHED = """
with recursive publication as (
    select p.*, p.xmin as row_version from pg_publication p where p.pubname = %(publication)s
), listed(oid) as (
    select r.prrelid from pg_publication_rel r join publication p on p.oid = r.prpubid
    {schemas}
    union select c.oid from pg_class c, publication p
           where p.puballtables and c.oid >= 16384 and c.relkind in ('r', 'p')
             and c.relpersistence = 'p'
), tree(root, oid) as (
    select oid, oid from listed
    union select t.root, i.inhrelid
            from tree t
            join pg_inherits i on i.inhparent = t.oid and not i.inhdetachpending
            join pg_class c on c.oid = i.inhrelid and c.relispartition
), published(oid) as (
    select distinct t.oid
      from tree t
      join pg_class c on c.oid = t.oid and c.relpersistence = 'p'
      cross join publication p
     where case when p.pubviaroot
                then not exists (select from tree a where a.oid = t.oid and a.root <> t.oid)
                else c.relkind = 'r' end
)
"""

_PUBLISHED_SCHEMAS = """
    union select c.oid
            from pg_publication_namespace n
            join publication p on p.oid = n.pnpubid
            join pg_class c on c.relnamespace = n.pnnspid
           where c.relkind in ('r', 'p') and c.relpersistence = 'p'
"""

_MEMBERS = """
select c.oid::bigint, {columns}
  from published t
  join pg_class c on c.oid = t.oid
  join pg_namespace n on n.oid = c.relnamespace
  {entries}
 order by n.nspname, c.relname
"""

# Column lists, row filters and FOR TABLES IN SCHEMA exist since PG 15. A table that is published
# with all tables, or with its schema, has neither list nor filter.
_ENTRIES = """
, entry as (
    select r.*
      from publication p
      join pg_publication_rel r on r.prpubid = p.oid
      join pg_class c on c.oid = r.prrelid
     where not p.puballtables
       and not exists (select from pg_publication_namespace s
                        where s.pnpubid = p.oid and s.pnnspid = c.relnamespace)
)
"""

_SENT_COLUMNS = """array(
    select a.attname::text
      from pg_attribute a cross join publication p
     where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
       and case when e.prattrs is not null then a.attnum = any(e.prattrs)
                else a.attgenerated::text in ('', to_jsonb(p) ->> 'pubgencols') end)
"""

# pg_get_expr() waits for the lock of ALTER TABLE on a table that has a row filter.
_ROW_FILTERS = """
select prrelid::bigint, pg_get_expr(prqual, prrelid) from entry where prqual is not null
"""

# All catalog rows that determine how tables are published, as of the transaction's snapshot. The
# `xmin` of a row distinguishes the row from a deleted and re-inserted row. The ancestors of a
# partition are included, because an ancestor may publish the partition.
_MEMBERSHIPS = """
with recursive line(relation, oid) as (
    select w.oid, w.oid from unnest(%(relations)s::bigint[]::oid[]) w(oid)
    union select l.relation, i.inhparent from pg_inherits i join line l on i.inhrelid = l.oid
), publication as (
    select p.*, p.xmin::text as row_version from pg_publication p where p.pubname = %(publication)s
), listed as (
    select l.relation, jsonb_agg(to_jsonb(r) || jsonb_build_object(
               'xmin', r.xmin::text, 'prqual', md5(to_jsonb(r) ->> 'prqual'), 'columns', {columns})
               order by r.oid) as found
      from pg_publication_rel r
      join publication p on p.oid = r.prpubid
      join line l on l.oid = r.prrelid
     group by 1
), schemas as ({schemas}
), classes as (
    select l.relation, jsonb_agg(jsonb_build_array(c.oid, c.relnamespace, c.relkind,
                                                   c.relpersistence) order by c.oid) as found
      from line l join pg_class c on c.oid = l.oid
     group by 1
), inherits as (
    select l.relation, jsonb_agg(to_jsonb(i) || jsonb_build_object('xmin', i.xmin::text)
                                 order by i.inhrelid, i.inhparent) as found
      from line l join pg_inherits i on i.inhrelid = l.oid
     group by 1
)
select w.oid::bigint,
       (select to_jsonb(p) || jsonb_build_object('schemas', {all_schemas}) from publication p),
       listed.found, schemas.found, classes.found, inherits.found
  from unnest(%(relations)s::bigint[]::oid[]) w(oid)
  left join listed on listed.relation = w.oid
  left join schemas on schemas.relation = w.oid
  left join classes on classes.relation = w.oid
  left join inherits on inherits.relation = w.oid
"""

# Column lists and FOR TABLES IN SCHEMA exist since PG 15.
_LISTED_COLUMNS = """(
    select jsonb_agg(a.attname order by a.attnum) from pg_attribute a
     where a.attrelid = r.prrelid and a.attnum = any(r.prattrs))"""
_SCHEMAS = """
    select l.relation, jsonb_agg(to_jsonb(n) || jsonb_build_object('xmin', n.xmin::text)
                                 order by n.oid) as found
      from pg_publication_namespace n
      join publication p on p.oid = n.pnpubid
      join pg_class c on c.relnamespace = n.pnnspid
      join line l on l.oid = c.oid
     group by 1"""
_ALL_SCHEMAS = """(
    select jsonb_agg(jsonb_build_array(n.oid, n.xmin::text) order by n.oid)
      from pg_publication_namespace n where n.pnpubid = p.oid)"""
_NO_SCHEMAS = "select null::oid as relation, null::jsonb as found"

_REFUSAL = """
select c.relkind::text, c.relpersistence::text, n.nspname ~ '^(pg_catalog|information_schema)$'
  from pg_class c join pg_namespace n on n.oid = c.relnamespace
 where n.nspname = %s and c.relname = %s
"""

_NOT_PUBLISHABLE = {
    "v": "is a view",
    "m": "is a materialized view",
    "f": "is a foreign table",
    "S": "is a sequence",
    "c": "is a composite type",
    "i": "is an index",
    "I": "is an index",
}


@dataclass(frozen=True, slots=True)
class Publication:
    """One row of pg_publication.

    Attributes:
        all_tables: FOR ALL TABLES.
        insert: INSERT is published; `update`, `delete` and `truncate` accordingly.
        via_root: publish_via_partition_root, changes of partitions have the root's name.
    """

    name: str
    all_tables: bool
    insert: bool
    update: bool
    delete: bool
    truncate: bool
    via_root: bool

    @property
    def needs_identity(self) -> bool:
        """Whether UPDATE or DELETE on a published table fails without a replica identity."""
        return self.update or self.delete


@dataclass(frozen=True, slots=True)
class Member:
    """A relation of a publication.

    Attributes:
        columns: names of the published columns; None before PG 15: all columns that are not
            generated.
    """

    relation_id: int
    columns: frozenset[str] | None


def read_publication(
    conn: Connection,
    publication: str,
    tables: Iterable[TableName] = (),
    renewal: str = renewal_command(UNKNOWN_CAPTURE),
) -> Publication:
    """Return a publication's options.

    Args:
        conn: a connection to the source database.
        publication: the publication's name.
        tables: (schema, table) of the declared tables, for the error's remedy.
        renewal: the command that begins a new epoch, for the error's remedy.

    Raises:
        ConfigurationError: the database has no publication of this name.
    """
    with conn.cursor() as cursor:
        cursor.execute(_PUBLICATION, (publication,))
        row = cursor.fetchone()
        if row is None:
            cursor.execute(
                "select current_database(), array_agg(pubname::text) from pg_publication"
            )
            database, others = cursor.fetchone() or ("?", None)
            known = f" (it has: {', '.join(sorted(others))})" if others else ""
            raise ConfigurationError(
                reason=f"Publication {publication} does not exist in database {database}{known}. "
                "Create the publication before the slot: "
                f"{create_publication_sql(publication, tables)}. If the publication was renamed, "
                "give it this name again: alter publication NAME rename to "
                f"{quoted(publication)}. If tables were changed while no publication had this "
                f"name, begin a new epoch with {renewal}."
            )
    return Publication(publication, *row)


def create_publication_sql(publication: str, tables: Iterable[TableName] = ()) -> str:
    """Return the CREATE PUBLICATION statement for the tables."""
    names = ", ".join(quoted(*table) for table in sorted(set(tables)))
    return f"create publication {quoted(publication)} for table {names or 'SCHEMA.TABLE'}"


def published_sql(conn: Connection) -> str:
    """Return the common table expressions `publication`, `listed`, `tree` and `published`.

    They need the parameter `publication`, and end without a comma. `published` has the OIDs of the
    relations under whose names changes arrive.
    """
    return _PUBLISHED.format(schemas=_PUBLISHED_SCHEMAS if conn.server_version >= 150000 else "")


def read_members(conn: Connection, publication: str) -> list[Member]:
    """Return the relations whose changes the publication sends, ordered by schema and name."""
    if conn.server_version >= 150000:
        entries = "left join entry e on e.prrelid = c.oid"
        query = _ENTRIES + _MEMBERS.format(columns=_SENT_COLUMNS, entries=entries)
    else:
        query = _MEMBERS.format(columns="null", entries="")
    with conn.cursor() as cursor:
        cursor.execute(published_sql(conn) + query, {"publication": publication})
        return [
            Member(relation_id, None if names is None else frozenset(names))
            for relation_id, names in cursor
        ]


def read_row_filters(conn: Connection, publication: str) -> dict[int, str]:
    """Return the row filters of a publication by OID, as SQL text that the catalog prints."""
    if conn.server_version < 150000:
        return {}
    query = published_sql(conn) + _ENTRIES + _ROW_FILTERS
    with conn.cursor() as cursor:
        cursor.execute(query, {"publication": publication})
        return {oid: text for oid, text in cursor if text is not None}


def read_memberships(
    conn: Connection, publication: str, relation_ids: Iterable[int]
) -> dict[int, Membership]:
    """Return all catalog rows that determine whether and how tables are published, by OID.

    Equal results in two transactions prove that the publication of the table did not change
    between the two snapshots.
    """
    has_schemas = conn.server_version >= 150000
    query = _MEMBERSHIPS.format(
        columns=_LISTED_COLUMNS if has_schemas else "null",
        schemas=_SCHEMAS if has_schemas else _NO_SCHEMAS,
        all_schemas=_ALL_SCHEMAS if has_schemas else "null",
    )
    with conn.cursor() as cursor:
        cursor.execute(query, {"relations": sorted(relation_ids), "publication": publication})
        return {
            relation_id: Membership(
                row,
                tuple(tables or ()),
                tuple(schemas or ()),
                tuple(classes or ()),
                tuple(inherits or ()),
            )
            for relation_id, row, tables, schemas, classes, inherits in cursor
        }


def explain_unpublished(conn: Connection, publication: str, schema: str, table: str) -> str:
    """Return the reason why a table is not in the publication, as a predicate: "is a view ..."."""
    with conn.cursor() as cursor:
        cursor.execute(_REFUSAL, (schema, table))
        row = cursor.fetchone()
    if row is None:
        return "does not exist"
    kind, persistence, is_catalog = row
    if kind in _NOT_PUBLISHABLE:
        return f"{_NOT_PUBLISHABLE[kind]}, which Postgres cannot publish"
    if is_catalog:
        return "is a system catalog, which Postgres cannot publish"
    if persistence == "u":
        return "is unlogged, so its changes are not in the WAL"
    if persistence == "t":
        return "is temporary, so its changes are not in the WAL"
    if kind == "p":
        return (
            f"is partitioned, and publication {publication} sends its partitions under their own "
            "names; publish the partitioned table with: alter publication "
            f"{quoted(publication)} set (publish_via_partition_root = true)"
        )
    return (
        f"is not in publication {publication}; add the table with: "
        f"alter publication {quoted(publication)} add table {quoted(schema, table)}"
    )
