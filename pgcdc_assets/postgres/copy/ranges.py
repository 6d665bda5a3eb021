"""Queries by which a later snapshot updates a range of pages that an earlier snapshot has read.

A row version keeps its `ctid` and its `xmin` until a transaction updates or deletes the row, or
rewrites the table. As of a later snapshot, the range therefore has two kinds of rows: earlier rows
that were neither deleted nor moved, and rows with an `xmin` that the earlier snapshot did not see.
Decision 33 has the proof.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from psycopg2.errors import LockNotAvailable

from pgcdc_assets.postgres.catalog.relations import PublishedTable

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

    from pgcdc_assets.protocol.relation import Column

# Transaction ids in rows have 32 bits: an older range cannot be compared with newer rows.
_MOST_TRANSACTIONS = 2**30

# Types whose texts depend on the catalog, so the text of an unchanged row changes.
_CATALOG_TYPES = ("reg", "aclitem", "_reg", "_aclitem")

# A role that may read some columns only may not read ctid. The functions open the tables, and wait
# for the lock of ALTER TABLE and VACUUM FULL.
_PAGE_COUNTS = """
set local lock_timeout = '1s';
select t.oid,
       case when has_table_privilege(t.oid::oid, 'select')
            then coalesce((select max(pg_relation_size(p.relid)) from pg_partition_tree(t.oid) p
                            where p.isleaf), pg_relation_size(t.oid), 0)
                   / current_setting('block_size')::bigint
            else 0 end
  from unnest(%s::bigint[]) as t(oid)
"""

# Each table with its direct and indirect partitions.
_TREE = """
with recursive tree (root, oid) as (
  select r, r::oid from unnest(%s::bigint[]) r
   union all
  select t.root, i.inhrelid from pg_inherits i join tree t on i.inhparent = t.oid)
"""

# `relpages` is that of the last VACUUM or ANALYZE. The last range of a table has no end.
_KNOWN_PAGE_COUNTS = f"""{_TREE}select t.root,
       case when has_table_privilege(t.root::oid, 'select') then max(greatest(c.relpages, 0))
            else 0 end
  from tree t join pg_class c on c.oid = t.oid
 group by t.root
"""

_XMIN = """
select pg_snapshot_xmin(s)::text::bigint, pg_snapshot_xmax(s)::text::bigint,
       md5(coalesce((select string_agg(concat_ws(':', oid, enumtypid, enumlabel), ',' order by oid)
                       from pg_enum), ''))
  from pg_current_snapshot() s
"""

# A catalog row with the same xmin is the same version of the row. VACUUM and ANALYZE write their
# figures into the existing version.
_STORAGE = f"""{_TREE}select t.root,
       bool_and(c.relkind = 'p' or (c.relkind = 'r' and m.amname = 'heap')),
       md5(string_agg(concat_ws(' ', c.oid, c.xmin, c.relfilenode,
         (select string_agg(concat_ws(':', a.attnum, a.xmin), ',' order by a.attnum)
            from pg_attribute a where a.attrelid = c.oid and a.attnum > 0),
         (select string_agg(concat_ws(':', i.indexrelid, i.xmin), ',' order by i.indexrelid)
            from pg_index i where i.indrelid = c.oid and (i.indisprimary or i.indisreplident)),
         (select string_agg(concat_ws(':', i.inhparent, i.xmin), ',' order by i.inhparent)
            from pg_inherits i where i.inhrelid = c.oid)), ';' order by c.oid))
  from tree t join pg_class c on c.oid = t.oid left join pg_am m on m.oid = c.relam
 group by t.root
"""


@dataclass(frozen=True, slots=True)
class RangeSource:
    """The state of a snapshot in which ranges of tables are read.

    Attributes:
        xmin: all transactions below this 64-bit id had ended.
        xmax: all transactions from this id on had not begun.
        storage: by OID a digest of everything but rows that determines a table's ctids and texts;
            tables whose ranges cannot be continued are missing.
    """

    xmin: int
    xmax: int
    storage: dict[int, str]

    def can_compare(self, xmin: int) -> bool:
        """Return whether rows can be compared with the `xmin` of an earlier snapshot."""
        return 0 <= self.xmax - xmin < _MOST_TRANSACTIONS


def read_range_source(
    conn: Connection, tables: Sequence[PublishedTable], timeline: int
) -> RangeSource:
    """Read the state of the snapshot.

    Args:
        conn: inside a transaction that reads as of the snapshot.
        tables: the tables to be read.
        timeline: of the server. After a failover, rows may be gone that an earlier snapshot had.
    """
    with conn.cursor() as cursor:
        cursor.execute(_XMIN)
        row = cursor.fetchone()
        assert row is not None
        xmin, xmax, enums = row
        wanted = {table.relation.relation_id: table for table in tables if _is_constant(table)}
        cursor.execute(_STORAGE, (list(wanted),))
        storage = {
            oid: f"{timeline} {enums} {digest} {wanted[oid].row_filter or ''}"
            for oid, is_heap, digest in cursor.fetchall()
            if is_heap
        }
    return RangeSource(xmin, xmax, storage)


def newer_sql(xmin: int) -> str:
    """Return the condition of rows that a snapshot with this `xmin` may not have seen.

    `age()` counts modulo 2^32. A row that was frozen long ago may look newer and is read again; a
    newer row never looks older (see `RangeSource.can_compare`).
    """
    return f"age(xmin) <= {_age(xmin)}"


def older_sql(xmin: int) -> str:
    """Return the condition of all other rows: the snapshot has seen them, with this content."""
    return f"age(xmin) > {_age(xmin)}"


def _age(xmin: int) -> str:
    return f"age('{xmin % 2**32}'::xid)"


def _is_constant(table: PublishedTable) -> bool:
    """Return whether each row has a key, and the same text in every snapshot that has the row."""
    relation = table.relation
    names = {column.name for column in relation.columns}
    has_key = bool(relation.row_key) and names.issuperset(relation.row_key)
    return has_key and not _depends_on_catalog(relation.columns)


def _depends_on_catalog(columns: Iterable[Column]) -> bool:
    return any(
        column.kind == "c"
        or column.base_type is None
        or column.base_type.startswith(_CATALOG_TYPES)
        for column in columns
    )


def read_page_counts(conn: Connection, tables: Iterable[PublishedTable]) -> dict[int, int]:
    """Return the number of pages by OID; of a partitioned table, of its largest partition.

    The number is 0 for a table of which this role may not read ranges. If one of the tables is
    locked, the numbers are the estimates of the catalog, so that the others can be copied.

    Args:
        conn: a connection in autocommit mode.
        tables: the tables.
    """
    oids = [table.relation.relation_id for table in tables]
    with conn.cursor() as cursor:
        try:
            cursor.execute(_PAGE_COUNTS, (oids,))
        except LockNotAvailable:
            cursor.execute(_KNOWN_PAGE_COUNTS, (oids,))
        return dict(cursor.fetchall())
