"""Declared tables that were renamed, moved to another schema, dropped, or unpublished.

The stream identifies a table by its OID, and names a table by its name at the time of the change.
The changes of a renamed table therefore belong to no declared table, and an unpublished table has
no changes. In both cases the SCD tables would become stale without an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pgcdc_assets.errors import TableMoved
from pgcdc_assets.table_name import TableName

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

_PLACES = """
select w.schema, w.name, n.nspname, c.relname,
       exists (select from pg_class d join pg_namespace m on m.oid = d.relnamespace
                where m.nspname = w.schema and d.relname = w.name),
       exists (select from pg_publication_tables p
                where p.pubname = %s and p.schemaname = n.nspname and p.tablename = c.relname)
  from unnest(%s::text[], %s::text[], %s::bigint[]) w(schema, name, oid)
  left join pg_class c on c.oid = w.oid::oid
  left join pg_namespace n on n.oid = c.relnamespace
"""


def find_moved_tables(
    conn: Connection, publication: str, known: Mapping[TableName, int]
) -> list[TableMoved]:
    """Return an error per declared table whose OID, name or publication has changed.

    The call makes one round trip.

    Args:
        conn: a connection to the source database.
        publication: the publication's name.
        known: OID of each declared table, (schema, table), at its last capture.
    """
    if not known:
        return []
    schemas, names = zip(*known, strict=True)
    with conn.cursor() as cursor:
        cursor.execute(_PLACES, (publication, list(schemas), list(names), list(known.values())))
        rows = cursor.fetchall()
    return [
        TableMoved(relation=str(declared), reason=reason)
        for schema, name, *place in rows
        if (reason := _reason(publication, declared := TableName(schema, name), *place)) is not None
    ]


def _reason(
    publication: str,
    declared: TableName,
    schema: str | None,
    name: str | None,
    is_taken: bool,
    is_published: bool,
) -> str | None:
    """Return a predicate for the change of a table, such as "was dropped"; None if unchanged."""
    if schema is None or name is None:
        return "was dropped and created again" if is_taken else "was dropped"
    if (schema, name) != declared:
        other = ", and another table has its name" if is_taken else ""
        return f"is named {TableName(schema, name)} now{other}"
    if not is_published:
        return f"is not in publication {publication} any more"
    return None
