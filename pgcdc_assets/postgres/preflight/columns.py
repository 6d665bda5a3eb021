"""Pre-flight check of columns: columns of a declared key, and generated columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pgcdc_assets.postgres.catalog.publication import published_sql
from pgcdc_assets.postgres.preflight.finding import Finding
from pgcdc_assets.table_name import quoted

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

    from pgcdc_assets.protocol.relation import Relation

# A table with a column list is skipped: the list omits columns on purpose.
_GENERATED = """
select c.oid::bigint, a.attname::text, a.attgenerated::text
  from published c
  join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
 where a.attgenerated <> ''
   and not exists (select from pg_publication_rel r join publication p on p.oid = r.prpubid
                    where r.prrelid = c.oid
                      and to_jsonb(r) ->> 'prattrs' is not null)
 order by a.attnum
"""

# A domain may have a NOT NULL constraint as well.
_NULLABLE = """
select a.attname::text
  from pg_attribute a join pg_type t on t.oid = a.atttypid
 where a.attrelid = %s::bigint::oid and a.attname = any(%s)
   and not a.attnotnull and not t.typnotnull
 order by a.attnum
"""

_STORED = "s"


def read_generated(conn: Connection, publication: str) -> dict[int, dict[str, str]]:
    """Return the generated columns of published tables, by OID: names and `attgenerated`."""
    with conn.cursor() as cursor:
        cursor.execute(published_sql(conn) + _GENERATED, {"publication": publication})
        found: dict[int, dict[str, str]] = {}
        for relation_id, name, kind in cursor:
            found.setdefault(relation_id, {})[name] = kind
        return found


def examine_generated(
    conn: Connection, publication: str, relation: Relation, generated: Mapping[str, str]
) -> Iterator[Finding]:
    """Yield a warning for the generated columns that the publication does not send."""
    sent = {column.name for column in relation.columns}
    missing = [name for name in generated if name not in sent]
    if not missing:
        return
    if conn.server_version < 180000:
        remedy = "Postgres 18 can publish stored generated columns; older versions cannot."
    elif any(generated[name] == _STORED for name in missing):
        remedy = f"alter publication {quoted(publication)} set (publish_generated_columns = stored)"
    else:
        remedy = "Postgres publishes stored generated columns only, and these are virtual."
    many = len(missing) > 1
    yield Finding(
        "generated",
        "warning",
        f"Table {relation.qualified_name}: generated column{'s' if many else ''} "
        f"{', '.join(missing)} {'are' if many else 'is'} not published, so the lake does not "
        f"contain {'these columns' if many else 'this column'}.",
        remedy,
        relation.qualified_name,
    )


def examine_key(conn: Connection, relation: Relation, key: Sequence[str]) -> Iterator[Finding]:
    """Yield errors for the columns of a declared key that are not published or may be NULL.

    The check for NULL is necessary with REPLICA IDENTITY FULL only. With another replica identity
    the key is part of an index without NULLs.
    """
    sent = [column.name for column in relation.columns]
    missing = [name for name in key if name not in sent]
    if missing:
        yield Finding(
            "key",
            "error",
            f"The declared key of table {relation.qualified_name} names {', '.join(missing)}, but "
            f"the table's published columns are {', '.join(sent)}.",
            "Correct `key` of this table in the capture's settings.",
            relation.qualified_name,
        )
    nullable = _read_nullable(conn, relation, key) if relation.has_full_identity else []
    if nullable:
        table = quoted(relation.schema, relation.table)
        changes = ", ".join(f"alter column {quoted(name)} set not null" for name in nullable)
        yield Finding(
            "key",
            "error",
            f"The declared key of table {relation.qualified_name} has columns that may be NULL: "
            f"{', '.join(nullable)}. A merge refuses rows with a NULL in the key.",
            f"alter table {table} {changes}",
            relation.qualified_name,
        )


def _read_nullable(conn: Connection, relation: Relation, names: Sequence[str]) -> list[str]:
    with conn.cursor() as cursor:
        cursor.execute(_NULLABLE, (relation.relation_id, list(names)))
        return [name for (name,) in cursor]


def examine_undeclared(
    published: Sequence[str], declared: Sequence[str], publication: str
) -> Iterator[Finding]:
    """Yield a warning for the tables that are published and not declared."""
    names = sorted(set(published) - set(declared))
    if names:
        yield Finding(
            "undeclared",
            "warning",
            f"Publication {publication} sends {len(names)} "
            f"table{'s that are' if len(names) > 1 else ' that is'} not declared: "
            f"{', '.join(names)}. The raw zone keeps their changes, but no SCD table is built.",
            "Declare these tables in the capture's settings, or remove these tables from the "
            "publication.",
        )
