"""Pre-flight check of partitions and inheriting tables that the publication does not send."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pgcdc_assets.error_text import first_names
from pgcdc_assets.postgres.catalog.publication import Publication, published_sql
from pgcdc_assets.postgres.preflight.finding import Finding
from pgcdc_assets.table_name import quoted

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

    from pgcdc_assets.protocol.relation import Relation

# A query of a partitioned table reads such a partition, and so does a copy.
_UNSENT = """
with recursive part(root, oid) as (
    select c.oid, c.oid
      from pg_class c where c.oid = any(%s::bigint[]::oid[]) and c.relkind = 'p'
    union select p.root, i.inhrelid from part p join pg_inherits i on i.inhparent = p.oid
)
select p.root::bigint, array_agg(c.oid::regclass::text order by c.oid::regclass::text)
  from part p join pg_class c on c.oid = p.oid
 where c.relkind = 'f' or (c.relkind = 'r' and c.relpersistence = 'u')
 group by p.root
"""

# A table that inherits from another one is a table of its own: neither the parent's copy nor its
# changes include it. The chunks of a TimescaleDB hypertable inherit from the hypertable.
_HEIRS = """
, heirs(root, oid) as (
    select c.oid, i.inhrelid
      from pg_class c join pg_inherits i on i.inhparent = c.oid
     where c.oid = any(%(tables)s::bigint[]::oid[]) and c.relkind = 'r'
    union select h.root, i.inhrelid from heirs h join pg_inherits i on i.inhparent = h.oid
)
select h.root::bigint, array_agg(h.oid::regclass::text order by h.oid::regclass::text)
  from heirs h
 where h.oid not in (select oid from published)
 group by h.root
"""

# A table may have thousands of partitions.
_MOST_NAMED = 5


def read_unsent_partitions(conn: Connection, relation_ids: Sequence[int]) -> dict[int, list[str]]:
    """Return the names of foreign and unlogged partitions by OID of the partitioned table."""
    with conn.cursor() as cursor:
        cursor.execute(_UNSENT, (list(relation_ids),))
        return dict(cursor.fetchall())


def read_unsent_heirs(
    conn: Connection, publication: str, relation_ids: Sequence[int]
) -> dict[int, list[str]]:
    """Return the names of the unpublished tables that inherit from published ones, by OID."""
    parameters = {"publication": publication, "tables": list(relation_ids)}
    with conn.cursor() as cursor:
        cursor.execute(published_sql(conn) + _HEIRS, parameters)
        return dict(cursor.fetchall())


def examine_unsent_heirs(
    publication: Publication, relation: Relation, names: Sequence[str]
) -> Iterator[Finding]:
    """Yield a warning for unpublished tables that inherit from a table."""
    if names:
        yield Finding(
            "unsent_child",
            "warning",
            f"Table {relation.qualified_name} has tables that inherit from it and are not "
            f"published ({first_names(names, _MOST_NAMED)}): a query of the table at the source "
            "also returns their rows, which the lake does not have.",
            f"alter publication {quoted(publication.name)} add table CHILD, and declare these "
            "tables. The chunks of a TimescaleDB hypertable are such tables.",
            relation.qualified_name,
        )


def examine_unsent_partitions(
    publication: Publication, relation: Relation, names: Sequence[str]
) -> Iterator[Finding]:
    """Yield a warning for the partitions of a table whose changes Postgres does not send."""
    if not names:
        return
    yield Finding(
        "unsent_partition",
        "warning",
        f"Table {relation.qualified_name} has partitions that are foreign or unlogged "
        f"({first_names(names, _MOST_NAMED)}): a snapshot has their rows, but their changes are "
        "not in the WAL, so the lake becomes stale.",
        "Make an unlogged partition logged: alter table PARTITION set logged. Detach a foreign "
        "one, or publish the partitions under their own names: alter publication "
        f"{quoted(publication.name)} set (publish_via_partition_root = false).",
        relation.qualified_name,
    )
