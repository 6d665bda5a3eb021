"""Declared tables at the source: their present names, and whether they are still captured.

The stream identifies a table by its OID, and names a table by its name at the time of the change. A
table that was renamed or moved to another schema is therefore followed. A table that was dropped or
unpublished has no changes. A declared name may belong to another table now. Without a check, the
SCD tables would become stale without an error in these cases.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pgcdc_assets.errors import TableMoved
from pgcdc_assets.postgres.catalog.publication import published_sql
from pgcdc_assets.postgres.catalog.relations import PublishedTable
from pgcdc_assets.table_name import TableName

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

_PLACES = """
select w.schema, w.name, n.nspname, c.relname,
       exists (select from pg_class d join pg_namespace m on m.oid = d.relnamespace
                where m.nspname = w.schema and d.relname = w.name),
       exists (select from published p where p.oid = c.oid),
       exists (select from published p
                 join pg_class d on d.oid = p.oid
                 join pg_namespace m on m.oid = d.relnamespace
                where m.nspname = w.schema and d.relname = w.name)
  from unnest(%(schemas)s::text[], %(names)s::text[], %(oids)s::bigint[]) w(schema, name, oid)
  left join pg_class c on c.oid = w.oid::oid
  left join pg_namespace n on n.oid = c.relnamespace
"""


@dataclass(frozen=True)
class SourcePlace:
    """The relation of a declared table in the catalog.

    Attributes:
        declared: the declared name.
        name: the relation's name now; None if the relation was dropped.
        error: the reason why the changes of the declared table are not captured; None if they are.
        is_replaced: another table of the publication has the declared name. The next snapshot
            copies this table.
    """

    declared: TableName
    name: TableName | None
    error: TableMoved | None = None
    is_replaced: bool = False

    @property
    def is_renamed(self) -> bool:
        """Whether the relation is followed under another name than the declared name."""
        return self.error is None and not self.is_replaced and self.name != self.declared


def read_source_places(
    conn: Connection, publication: str, known: Mapping[TableName, int]
) -> dict[TableName, SourcePlace]:
    """Return the place of each declared table in one round trip.

    Args:
        conn: a connection to the source database.
        publication: the publication's name.
        known: OID of each declared table, (schema, table), in its newest snapshot.
    """
    if not known:
        return {}
    schemas, names = zip(*known, strict=True)
    with conn.cursor() as cursor:
        cursor.execute(
            published_sql(conn) + _PLACES,
            {
                "publication": publication,
                "schemas": list(schemas),
                "names": list(names),
                "oids": list(known.values()),
            },
        )
        rows = cursor.fetchall()
    places = {}
    for declared_schema, declared_table, schema, table, *facts in rows:
        declared = TableName(declared_schema, declared_table)
        name = None if schema is None or table is None else TableName(schema, table)
        reason = _reason(publication, declared, name, *facts)
        error = None if reason is None else TableMoved(relation=str(declared), reason=reason)
        *_, is_taken_by_published = facts
        places[declared] = SourcePlace(
            declared, name, error, is_replaced=is_taken_by_published and name != declared
        )
    return places


def find_declared_table(
    published: Iterable[PublishedTable], table: TableName, relation_id: int | None
) -> PublishedTable | None:
    """Find a declared table: the table with its name, else the table with its OID.

    Args:
        published: the tables of the publication.
        relation_id: OID of the declared table in its newest snapshot; None without a snapshot.
    """
    renamed = None
    for found in published:
        if found.relation.name == table:
            return found
        if found.relation.relation_id == relation_id:
            renamed = replace(found, declared=table)
    return renamed


def _reason(
    publication: str,
    declared: TableName,
    name: TableName | None,
    is_taken: bool,
    is_published: bool,
    is_taken_by_published: bool,
) -> str | None:
    """Return a predicate for the loss of a table, such as "was dropped"; None without a loss.

    Args:
        is_taken: a relation has the declared name.
        is_published: the publication sends the relation.
        is_taken_by_published: the publication sends the relation with the declared name.
    """
    if name is None:
        return "was dropped and created again" if is_taken else "was dropped"
    if name != declared and is_taken:
        other = f"another table, which publication {publication} does not send,"
        if is_taken_by_published:
            other = "another table"
        return f"is named {name} now, and {other} has its name"
    if not is_published:
        moved = "" if name == declared else f"is named {name} now, and "
        return f"{moved}is not in publication {publication} any more"
    return None
