"""Declared tables that are not what they were: renamed, moved, dropped, or not published any more.

The stream knows a table by its OID, and its changes arrive under the name that it has then. So the
changes of a renamed table belong to no declared table, and one that left the publication has none.
Either way the tables made of it would go stale without an error.
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
    """Find the tables that are not where their changes came from, in one round trip.

    Args:
        known: the OID by which each declared table was last captured.
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
    """Say in half a sentence what became of a table; None if it is where it was."""
    if schema is None or name is None:
        return "was dropped and created again" if is_taken else "was dropped"
    if (schema, name) != declared:
        other = ", and another table has its name" if is_taken else ""
        return f"is called {TableName(schema, name)} now{other}"
    if not is_published:
        return f"is not in publication {publication} any more"
    return None
