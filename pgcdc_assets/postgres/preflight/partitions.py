"""Pre-flight check of partitions whose changes Postgres does not send."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pgcdc_assets.postgres.preflight.finding import Finding
from pgcdc_assets.postgres.publication import Publication
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

# A table may have thousands of partitions.
_MOST_NAMED = 5


def read_unsent_partitions(conn: Connection, relation_ids: Sequence[int]) -> dict[int, list[str]]:
    """Return the names of foreign and unlogged partitions by OID of the partitioned table."""
    with conn.cursor() as cursor:
        cursor.execute(_UNSENT, (list(relation_ids),))
        return dict(cursor.fetchall())


def check_unsent_partitions(
    publication: Publication, relation: Relation, names: Sequence[str]
) -> Iterator[Finding]:
    """Yield a warning for the partitions of a table whose changes Postgres does not send."""
    if not names:
        return
    shown = ", ".join(names[:_MOST_NAMED])
    if len(names) > _MOST_NAMED:
        shown += f" and {len(names) - _MOST_NAMED} more"
    yield Finding(
        "unsent_partition",
        "warning",
        f"Table {relation.qualified_name} has partitions that are foreign or unlogged ({shown}): a "
        "snapshot has their rows, but their changes are not in the WAL, so the lake becomes stale.",
        "Make an unlogged partition logged: alter table PARTITION set logged. Detach a foreign "
        "one, or publish the partitions under their own names: alter publication "
        f"{quoted(publication.name)} set (publish_via_partition_root = false).",
        relation.qualified_name,
    )
