"""Publications: the published operations and the published tables.

The view pg_publication_tables (Postgres documentation, chapter 52 System Views) lists the relations
under whose names changes arrive. The view covers FOR TABLE, FOR ALL TABLES and FOR TABLES IN
SCHEMA, and partitions with and without publish_via_partition_root.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.table_name import TableName, quoted

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

_PUBLICATION = """
select puballtables, pubinsert, pubupdate, pubdelete, pubtruncate, pubviaroot
  from pg_publication where pubname = %s
"""

# Column lists and row filters, and the two columns of the view, exist since PG 15.
_MEMBERS = """
select c.oid::bigint, c.relkind::text, {columns}
  from pg_publication_tables t
  join pg_namespace n on n.nspname = t.schemaname
  join pg_class c on c.relnamespace = n.oid and c.relname = t.tablename
 where t.pubname = %s
 order by t.schemaname, t.tablename
"""

# All catalog rows that determine how a table is published, as of the transaction's snapshot. The
# view pg_publication_tables is unsuitable, because its functions read the newest catalog in every
# transaction. The `xmin` of a row distinguishes the row from a deleted and re-inserted row. The
# ancestors of a partition are included, because an ancestor may publish the partition.
_MEMBERSHIP = """
with recursive line(oid) as (
    select %(relation)s::oid
    union select i.inhparent from pg_inherits i join line l on i.inhrelid = l.oid
), publication as (
    select p.*, p.xmin::text as row_version from pg_publication p where p.pubname = %(publication)s
)
select (select jsonb_agg(to_jsonb(p)) from publication p),
       (select jsonb_agg(to_jsonb(r) || jsonb_build_object('xmin', r.xmin::text) order by r.oid)
          from pg_publication_rel r join publication p on p.oid = r.prpubid
         where r.prrelid in (select oid from line)),
       {schemas},
       (select jsonb_agg(jsonb_build_array(c.oid, c.relnamespace, c.relkind, c.relpersistence)
                         order by c.oid)
          from pg_class c where c.oid in (select oid from line)),
       (select jsonb_agg(to_jsonb(i) order by i.inhrelid, i.inhparent)
          from pg_inherits i where i.inhrelid in (select oid from line))
"""

# FOR TABLES IN SCHEMA exists since PG 15.
_SCHEMAS = """
(select jsonb_agg(to_jsonb(n) || jsonb_build_object('xmin', n.xmin::text) order by n.oid)
   from pg_publication_namespace n join publication p on p.oid = n.pnpubid
  where n.pnnspid in (select c.relnamespace from pg_class c where c.oid in (select oid from line)))
"""

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
        kind: `pg_class.relkind`: r, or p for the root of a partitioned table.
        columns: names of the published columns; None before PG 15: all columns that are not
            generated.
        row_filter: SQL text of the WHERE clause, as the catalog prints it.
    """

    relation_id: int
    kind: str
    columns: frozenset[str] | None
    row_filter: str | None


def read_publication(
    conn: Connection, publication: str, tables: Iterable[TableName] = ()
) -> Publication:
    """Return a publication's options.

    Args:
        conn: a connection to the source database.
        publication: the publication's name.
        tables: (schema, table) of the declared tables, for the error's remedy.

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
                f"{create_publication_sql(publication, tables)}. If tables were changed while the "
                "publication did not exist, begin a new epoch with pgcdc renew."
            )
    return Publication(publication, *row)


def create_publication_sql(publication: str, tables: Iterable[TableName] = ()) -> str:
    """Return the CREATE PUBLICATION statement for the tables."""
    names = ", ".join(quoted(*table) for table in sorted(set(tables)))
    return f"create publication {quoted(publication)} for table {names or 'SCHEMA.TABLE'}"


def read_members(conn: Connection, publication: str) -> list[Member]:
    """Return the relations whose changes the publication sends, ordered by schema and name."""
    columns = "t.attnames::text[], t.rowfilter" if conn.server_version >= 150000 else "null, null"
    with conn.cursor() as cursor:
        cursor.execute(_MEMBERS.format(columns=columns), (publication,))
        return [
            Member(relation_id, kind, None if names is None else frozenset(names), row_filter)
            for relation_id, kind, names, row_filter in cursor
        ]


def read_membership(conn: Connection, publication: str, relation_id: int) -> tuple[Any, ...]:
    """Return all catalog rows that determine whether and how a table is published.

    Equal results in two transactions prove that the publication of the table did not change
    between the two snapshots.
    """
    schemas = _SCHEMAS if conn.server_version >= 150000 else "null"
    with conn.cursor() as cursor:
        cursor.execute(
            _MEMBERSHIP.format(schemas=schemas),
            {"relation": relation_id, "publication": publication},
        )
        row: tuple[Any, ...] = cursor.fetchone() or ()
    return row


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
            f'"{publication}" set (publish_via_partition_root = true)'
        )
    return (
        f"is not in publication {publication}; add the table with: "
        f'alter publication "{publication}" add table "{schema}"."{table}"'
    )
