"""The tables that a publication sends, with the reason why a table cannot be captured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pgcdc_assets.postgres.catalog.publication import read_publication
from pgcdc_assets.postgres.catalog.relations import published_relations
from pgcdc_assets.postgres.preflight.tables import examine_tables
from pgcdc_assets.protocol.relation import Relation
from pgcdc_assets.table_name import TableName

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

_ROLE = """
select current_user::text, array(select nspname::text from pg_namespace
                                  where not has_schema_privilege(oid, 'usage'))
"""

# What decides about access beside the rows that `read_catalog_digest` covers.
_ROLE_DIGEST = """
select concat_ws(':', current_user, r.rolsuper, r.rolbypassrls,
                 (select md5(string_agg(concat_ws(' ', m.roleid, m.member, m.xmin), ','
                                        order by m.roleid, m.member))
                    from pg_auth_members m))
  from pg_roles r where r.rolname = current_user
"""


@dataclass(frozen=True)
class CapturableTable:
    """A table of the publication.

    Attributes:
        relation: the table, with the published columns.
        refusal: the errors of the pre-flight, with remedies; None for a table without an error.
    """

    relation: Relation
    refusal: str | None


def read_capturable_tables(
    conn: Connection, publication: str, keys: Mapping[TableName, Sequence[str]]
) -> list[CapturableTable]:
    """Return the tables of a publication.

    Args:
        conn: a connection to the source database.
        publication: the publication's name.
        keys: columns of the declared keys.

    Raises:
        ConfigurationError: the publication does not exist.
    """
    published = read_publication(conn, publication)
    with conn.cursor() as cursor:
        cursor.execute(_ROLE)
        role, closed_schemas = cursor.fetchone() or ("", [])
    errors: dict[str, list[str]] = {}
    for finding in examine_tables(conn, published, None, keys, role, {}):
        if finding.severity == "error" and finding.table is not None:
            errors.setdefault(finding.table, []).append(str(finding))
    tables = []
    for relation in published_relations(conn, publication):
        own = errors.get(relation.qualified_name, [])
        if relation.schema in closed_schemas:
            own = [f"This role has no USAGE on schema {relation.schema}.", *own]
        tables.append(CapturableTable(relation, " ".join(own) or None))
    return tables


def read_role_digest(conn: Connection) -> str:
    """Return a digest of the role's rights. It changes if the role gets or loses a right."""
    with conn.cursor() as cursor:
        cursor.execute(_ROLE_DIGEST)
        row = cursor.fetchone()
    return "" if row is None else str(row[0])
