"""Pre-flight check of publication and tables: operations, keys and privileges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pgcdc_assets.postgres.catalog.moved_tables import find_declared_table
from pgcdc_assets.postgres.catalog.publication import Publication, explain_unpublished
from pgcdc_assets.postgres.catalog.relations import published_tables
from pgcdc_assets.postgres.preflight.columns import (
    examine_generated,
    examine_key,
    examine_undeclared,
    read_generated,
)
from pgcdc_assets.postgres.preflight.finding import Finding
from pgcdc_assets.postgres.preflight.partitions import (
    examine_unsent_heirs,
    examine_unsent_partitions,
    read_unsent_heirs,
    read_unsent_partitions,
)
from pgcdc_assets.postgres.preflight.replica_identity import examine_identity, read_identities
from pgcdc_assets.table_name import TableName, quoted

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

    from pgcdc_assets.protocol.relation import Relation

_ACCESS = """
select c.oid::bigint, has_schema_privilege(n.oid, 'usage'),
       has_table_privilege(c.oid, 'select'), row_security_active(c.oid), c.relispartition,
       array(select a.attname::text from pg_attribute a
              where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
                and has_column_privilege(c.oid, a.attnum, 'select'))
  from pg_class c join pg_namespace n on n.oid = c.relnamespace
 where c.oid = any(%s::bigint[]::oid[])
"""


class _Access(NamedTuple):
    schema_usage: bool
    table_select: bool
    row_security: bool
    is_partition: bool
    readable: list[str]


def examine_publication(
    publication: Publication, table_count: int, *, may_be_empty: bool = False
) -> Iterator[Finding]:
    """Yield findings about the published operations and the number of tables.

    Args:
        may_be_empty: the tables of the publication are followed, so tables may be added later.
    """
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
            f"Publication {name} does not send {' and '.join(missing)}: these changes never "
            "arrive.",
            f"alter publication {quoted(name)} set (publish = 'insert, update, delete, truncate')",
        )
    if not table_count:
        yield Finding(
            "publication",
            "warning" if may_be_empty else "error",
            f"Publication {name} has no tables.",
            # Postgres adds no table to a publication of all tables.
            "create table SCHEMA.TABLE (...)"
            if publication.all_tables
            else f"alter publication {quoted(name)} add table SCHEMA.TABLE",
        )
    else:
        yield Finding("publication", "ok", f"Publication {name} has {table_count} tables.")


def examine_tables(
    conn: Connection,
    publication: Publication,
    tables: Sequence[TableName] | None,
    keys: Mapping[TableName, Sequence[str]],
    role: str,
    known: Mapping[TableName, int],
    *,
    may_be_empty: bool = False,
) -> Iterator[Finding]:
    """Yield findings about the publication and about each table.

    Args:
        conn: a connection to the source database.
        publication: the publication.
        tables: (schema, table) of the tables to check; None: all tables of the publication.
        keys: columns of the declared keys, by (schema, table).
        role: the connection's role.
        known: OIDs of captured tables by declared name, for tables that were renamed since.
        may_be_empty: the tables of the publication are followed, so tables may be added later.
    """
    members = published_tables(conn, publication.name, has_filters=False)
    published = {table.relation.name: table for table in members}
    yield from examine_publication(publication, len(published), may_be_empty=may_be_empty)
    relation_ids = [table.relation.relation_id for table in published.values()]
    access = _read_access(conn, relation_ids)
    identities = read_identities(conn, publication, relation_ids)
    generated = read_generated(conn, publication.name)
    unsent = read_unsent_partitions(conn, relation_ids)
    heirs = read_unsent_heirs(conn, publication.name, relation_ids)
    wanted = list(published if tables is None else dict.fromkeys(tables))
    found_as = {name: find_declared_table(members, name, known.get(name)) for name in wanted}
    yield from _check_schemas(
        [found.relation for found in found_as.values() if found], access, quoted(role)
    )
    if tables is not None:
        names = [str(name) for name in published]
        declared = [str(f.relation.name if f else name) for name, f in found_as.items()]
        yield from examine_undeclared(names, declared, publication.name)
    for name in wanted:
        found, shown = found_as[name], str(name)
        if found is None:
            reason = explain_unpublished(conn, publication.name, *name)
            yield Finding("table", "error", f"Table {shown} {reason}.", table=shown)
            continue
        relation_id = found.relation.relation_id
        findings = [
            *examine_identity(publication, found, identities[relation_id], name in keys),
            *examine_key(conn, found.relation, keys.get(name, ())),
            *_check_access(publication, found.relation, access[relation_id], quoted(role)),
            *examine_unsent_partitions(publication, found.relation, unsent.get(relation_id, ())),
            *examine_unsent_heirs(publication, found.relation, heirs.get(relation_id, ())),
        ]
        if not any(finding.code == "generated_column" for finding in findings):
            columns = generated.get(relation_id, {})
            findings += examine_generated(conn, publication.name, found.relation, columns)
        if not findings and not access[relation_id].schema_usage:
            continue
        source = found.relation.name
        now = "" if source == name else f", and is named {source} at the source"
        ready = Finding("table", "ok", f"Table {shown} is ready{now}.", table=shown)
        yield from findings or [ready]


def _check_schemas(
    relations: Sequence[Relation], access: Mapping[int, _Access], role: str
) -> Iterator[Finding]:
    """Yield one error per schema without the USAGE privilege."""
    denied: dict[str, int] = {}
    for relation in relations:
        if not access[relation.relation_id].schema_usage:
            denied[relation.schema] = denied.get(relation.schema, 0) + 1
    for schema, count in denied.items():
        what = "its table" if count == 1 else f"its {count} tables"
        yield Finding(
            "privilege",
            "error",
            f"This role has no USAGE on schema {schema}, so {what} cannot be copied.",
            f"grant usage on schema {quoted(schema)} to {role}",
        )


def _check_access(
    publication: Publication, relation: Relation, access: _Access, role: str
) -> Iterator[Finding]:
    name, sql_name = relation.qualified_name, quoted(relation.schema, relation.table)
    sent = {column.name for column in relation.columns}
    if not access.table_select and not sent <= set(access.readable):
        yield Finding(
            "privilege",
            "error",
            f"This role has no SELECT on table {name}, so the table cannot be copied.",
            f"grant select on {sql_name} to {role}",
            name,
        )
    if access.row_security:
        yield Finding(
            "row_security",
            "error",
            f"Table {name} has row-level security, which would hide rows from the copy.",
            f"alter role {role} bypassrls",
            name,
        )
    if access.is_partition and not publication.via_root:
        yield Finding(
            "partition",
            "warning",
            f"Partition {name} is published as a table of its own.",
            f"To publish one table: alter publication {quoted(publication.name)} set "
            "(publish_via_partition_root = true)",
            name,
        )


def _read_access(conn: Connection, relation_ids: Sequence[int]) -> dict[int, _Access]:
    with conn.cursor() as cursor:
        cursor.execute(_ACCESS, (list(relation_ids),))
        return {row[0]: _Access(*row[1:]) for row in cursor}
