"""Pre-flight of publication and tables: what is sent, what identifies a row, what we may read."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pgcdc_assets.postgres.catalog import PublishedTable, published_tables, read_relations
from pgcdc_assets.postgres.findings import Finding, quoted
from pgcdc_assets.postgres.publication import Publication, explain_unpublished

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

    from pgcdc_assets.protocol.relation import Relation

_ACCESS = """
select c.oid::bigint, has_schema_privilege(n.oid, 'usage'),
       has_table_privilege(c.oid, 'select'), row_security_active(c.oid), c.relispartition,
       array(select a.attname::text from pg_attribute a
              where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
                and has_column_privilege(c.oid, a.attnum, 'select')),
       array(select a.attname::text from pg_attribute a
              where a.attrelid = c.oid and a.attgenerated <> ''),
       exists (select from pg_index i
                where i.indrelid = c.oid and i.indisprimary and not i.indimmediate)
  from pg_class c join pg_namespace n on n.oid = c.relnamespace
 where c.oid = any(%s::bigint[]::oid[])
"""

# Columns of row filters that the replica identity does not have. A filter belongs to the table that
# is published; of a partitioned one the identities that count are those of its leaves. The catalog
# keeps a filter as the tree of its expression, in which a column is a number.
_BEYOND_IDENTITY = """
with used as (
    select distinct r.prrelid as relation, a.attname as name
      from pg_publication p
      join pg_publication_rel r on r.prpubid = p.oid
     cross join regexp_matches(r.prqual::text, ':varattno (\\d+)', 'g') as numbers
      join pg_attribute a on a.attrelid = r.prrelid and a.attnum = numbers[1]::int
     where p.pubname = %s
), leaves as (
    select relation, name, coalesce(t.relid, relation::regclass) as leaf
      from used left join lateral pg_partition_tree(relation) t on t.isleaf
)
select relation::bigint, array_agg(distinct l.name::text), array_agg(distinct l.leaf::text)
  from leaves l join pg_class c on c.oid = l.leaf
 where c.relkind = 'r' and c.relreplident <> 'f' and not exists (
    select from pg_index i join pg_attribute k on k.attrelid = i.indrelid
     where i.indrelid = l.leaf and k.attname = l.name
       and k.attnum = any((i.indkey::int2[])[0:i.indnkeyatts - 1])
       and case c.relreplident when 'd' then i.indisprimary and i.indimmediate
                               when 'i' then i.indisreplident else false end)
 group by relation
"""


class _Beyond(NamedTuple):
    columns: list[str]
    tables: list[str]


class _Access(NamedTuple):
    schema_usage: bool
    table_select: bool
    row_security: bool
    is_partition: bool
    readable: list[str]
    generated: list[str]
    deferrable_key: bool


def check_publication(publication: Publication, table_count: int) -> Iterator[Finding]:
    """Check what the publication sends at all."""
    kinds = {
        "insert": publication.insert,
        "update": publication.update,
        "delete": publication.delete,
        "truncate": publication.truncate,
    }
    missing = [kind for kind, sent in kinds.items() if not sent]
    name = publication.name
    if missing:
        yield Finding(
            "publish",
            "warning",
            f"Publication {name} does not send {' and '.join(missing)}: such changes never arrive.",
            f"alter publication {quoted(name)} set (publish = 'insert, update, delete, truncate')",
        )
    if not table_count:
        yield Finding(
            "publication",
            "error",
            f"Publication {name} has no tables.",
            f"alter publication {quoted(name)} add table SCHEMA.TABLE",
        )
    else:
        yield Finding("publication", "ok", f"Publication {name} has {table_count} tables.")


def check_tables(
    conn: Connection,
    publication: Publication,
    tables: Sequence[tuple[str, str]] | None,
    keyed: Collection[tuple[str, str]],
    role: str,
) -> Iterator[Finding]:
    """Check each published table, or the ones named.

    Args:
        keyed: tables whose key is declared in the definitions, so that they need none in the
            catalog.
    """
    published = {
        (table.relation.schema, table.relation.table): table
        for table in published_tables(conn, publication.name)
    }
    yield from check_publication(publication, len(published))
    access = _read_access(conn, [table.relation.relation_id for table in published.values()])
    whole = read_relations(conn, access)
    filtered = _read_filtered(conn, publication)
    for name in published if tables is None else dict.fromkeys(tables):
        found = published.get(name)
        if found is None:
            reason = explain_unpublished(conn, publication.name, *name)
            yield Finding(
                "table", "error", f"Table {'.'.join(name)} {reason}.", table=".".join(name)
            )
            continue
        findings = list(
            _check_table(
                publication,
                found,
                whole[found.relation.relation_id],
                access[found.relation.relation_id],
                filtered.get(found.relation.relation_id),
                name in keyed,
                quoted(role),
            )
        )
        yield from findings or [
            Finding("table", "ok", f"Table {'.'.join(name)} is ready.", table=".".join(name))
        ]


def _check_table(
    publication: Publication,
    table: PublishedTable,
    whole: Relation,
    access: _Access,
    filtered: _Beyond | None,
    has_declared_key: bool,
    role: str,
) -> Iterator[Finding]:
    relation = table.relation
    name, sql_name = relation.qualified_name, quoted(relation.schema, relation.table)
    yield from _check_identity(publication, table, whole, access, filtered, has_declared_key)
    sent = {column.name for column in relation.columns}
    if not access.schema_usage:
        yield Finding(
            "privilege",
            "error",
            f"This role may not use schema {relation.schema}, so {name} cannot be copied.",
            f"grant usage on schema {quoted(relation.schema)} to {role}",
            name,
        )
    if not access.table_select and not sent <= set(access.readable):
        yield Finding(
            "privilege",
            "error",
            f"This role may not read table {name}, so it cannot be copied.",
            f"grant select on {sql_name} to {role}",
            name,
        )
    if access.row_security:
        yield Finding(
            "row_security",
            "error",
            f"Table {name} has row-level security, which would hide rows from its copy.",
            f"alter role {role} bypassrls",
            name,
        )
    if access.is_partition and not publication.via_root:
        yield Finding(
            "partition",
            "warning",
            f"Partition {name} arrives as a table of its own.",
            f"For one table: alter publication {quoted(publication.name)} set "
            "(publish_via_partition_root = true)",
            name,
        )


def _check_identity(
    publication: Publication,
    table: PublishedTable,
    whole: Relation,
    access: _Access,
    filtered: _Beyond | None,
    has_declared_key: bool,
) -> Iterator[Finding]:
    relation = table.relation
    name, sql_name = relation.qualified_name, quoted(relation.schema, relation.table)
    identity = {column.name for column in whole.columns if column.is_key}
    full = f"alter table {sql_name} replica identity full"
    if publication.needs_identity and not identity:
        why = {
            "n": "replica identity NOTHING",
            "i": "a replica identity index that is gone",
        }.get(relation.replica_identity, "no primary key")
        if relation.replica_identity == "d" and access.deferrable_key:
            why = "a deferrable primary key, which is no replica identity"
        yield Finding(
            "replica_identity",
            "error",
            f"Table {name} has {why}: with updates or deletes published, the application's UPDATE "
            f"and DELETE "
            "on it fail.",
            _identity_remedy(relation, sql_name, full),
            name,
        )
        return
    sent = {column.name for column in relation.columns}
    unsent = identity - sent - set(access.generated)
    if publication.needs_identity and unsent:
        yield Finding(
            "column_list",
            "error",
            f"The column list of table {name} leaves out {', '.join(sorted(unsent))} of its "
            f"replica identity: "
            "the application's UPDATE and DELETE on it fail.",
            f"Name these columns in publication {publication.name} too, or leave out the column "
            f"list.",
            name,
        )
    if filtered is not None:
        yield Finding(
            "row_filter",
            "error",
            f"The row filter of table {name} uses {', '.join(filtered.columns)}, which the replica "
            f"identity of {', '.join(filtered.tables)} does not have: the application's UPDATE and "
            "DELETE on it fail.",
            "; ".join(f"alter table {table} replica identity full" for table in filtered.tables)
            + "; or leave these columns out of the filter.",
            name,
        )
    has_key = bool(relation.primary_key) or relation.replica_identity == "i" or has_declared_key
    if not has_key:
        yield Finding(
            "key",
            "warning",
            f"Table {name} has no key: it is kept as a bag of rows (`scd: [1]` only), and to merge "
            "an update or a delete the whole table is read.",
            f"alter table {sql_name} add primary key (COLUMN, ...); or declare `key` for it in the "
            "definitions; or, to keep its changes instead of its rows, `without_key: log`.",
            name,
        )


def _identity_remedy(relation: Relation, sql_name: str, full: str) -> str:
    if relation.primary_key and relation.replica_identity != "d":
        return f"alter table {sql_name} replica identity default"
    if relation.primary_key:
        return full
    return f"alter table {sql_name} add primary key (COLUMN, ...); or: {full}"


def _read_access(conn: Connection, relation_ids: Sequence[int]) -> dict[int, _Access]:
    with conn.cursor() as cursor:
        cursor.execute(_ACCESS, (list(relation_ids),))
        return {row[0]: _Access(*row[1:]) for row in cursor}


def _read_filtered(conn: Connection, publication: Publication) -> dict[int, _Beyond]:
    """What row filters use beyond the replica identity, by published table."""
    if conn.server_version < 150000 or not publication.needs_identity:
        return {}
    with conn.cursor() as cursor:
        cursor.execute(_BEYOND_IDENTITY, (publication.name,))
        return {row[0]: _Beyond(*row[1:]) for row in cursor}
