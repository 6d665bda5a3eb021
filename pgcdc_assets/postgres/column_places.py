"""Which columns of the catalog an announced relation has, by their places.

A Relation message has names and types, and no attnums. Its columns are in the order of their
attnums. A table never reuses an attnum, and a dropped column keeps its row in `pg_attribute`. At
any time, a table has the columns with the attnums 1 to n, without the columns that were dropped by
then. The announced columns therefore have certain attnums, whatever their names are now, if it is
known which of the dropped columns existed at that time.

ALTER TABLE waits for the transactions that have written to the table. If an earlier version lacks a
dropped column, the column did not exist. Otherwise names and types tell, and the id of the
transaction that dropped the column (`xmin` of its row) against the id of the announcing
transaction. Both are good evidence and no proof: columns get the names of others, and ids are not
in the order of the commits. If the two do not agree on one result, the result is not certain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

    from pgcdc_assets.protocol.relation import Column, Relation

# Bounds the search if many columns were dropped since the message.
_MOST_RESULTS = 256

_Attnums = tuple[int, ...]

_ATTRIBUTES = """
select attrelid::bigint, attnum, xmin::text::bigint, attisdropped,
       (pg_snapshot_xmax(pg_current_snapshot())::text::bigint & 4294967295)
  from pg_attribute
 where attrelid = any(%s::bigint[]::oid[]) and attnum > 0
 order by 1, 2
"""

# Column lists exist since PG 15, and published generated columns since PG 18.
_PUBLICATION = """
with recursive publication as (
    select p.oid, to_jsonb(p) as options from pg_publication p where p.pubname = %(publication)s
), line(relation, oid) as (
    select w.oid, w.oid from unnest(%(relations)s::bigint[]::oid[]) w(oid)
    union select l.relation, i.inhparent from pg_inherits i join line l on i.inhrelid = l.oid
)
select coalesce((select array_agg(distinct l.relation::bigint)
                   from line l
                   join pg_publication_rel r on r.prrelid = l.oid
                   join publication p on p.oid = r.prpubid
                  where to_jsonb(r) ->> 'prattrs' is not null), '{}'),
       coalesce((select options ->> 'pubgencols' = 's' from publication), false)
"""


@dataclass(frozen=True, slots=True)
class Attribute:
    """A row of `pg_attribute`.

    Attributes:
        changed_by: id of the transaction that has last changed the row.
        is_dropped: the column was dropped.
        newest_xid: id of the next transaction when the row was read.
    """

    attnum: int
    changed_by: int
    is_dropped: bool
    newest_xid: int

    def is_changed_after(self, xid: int) -> bool | None:
        """Return whether the last change has a later transaction id; None for the same one.

        Ids are compared by their age, because they are assigned modulo 2^32.
        """
        if self.changed_by == xid:
            return None
        return (self.newest_xid - xid) % 2**32 > (self.newest_xid - self.changed_by) % 2**32


@dataclass(frozen=True, slots=True)
class Attributes:
    """The columns of one relation in the catalog, dropped ones included.

    Attributes:
        rows: the rows of `pg_attribute` in order.
        has_column_list: the publication sends some columns only, so places tell nothing.
        sends_generated: the publication sends stored generated columns.
    """

    rows: Sequence[Attribute] = ()
    has_column_list: bool = False
    sends_generated: bool = False

    def may_exceed(self, attnum: int, xid: int) -> bool:
        """Return whether a column after `attnum` may have been added after a transaction."""
        later = (row for row in self.rows if row.attnum > attnum)
        return any(not row.is_dropped or row.is_changed_after(xid) is not False for row in later)


@dataclass(frozen=True, slots=True)
class Places:
    """The attnums of announced columns.

    Attributes:
        attnums: in the order of the columns.
        is_certain: there is no evidence for other attnums.
    """

    attnums: _Attnums
    is_certain: bool


def read_attributes(
    conn: Connection, publication: str, relation_ids: Sequence[int]
) -> dict[int, Attributes]:
    """Return the columns of relations by OID."""
    relations = sorted(relation_ids)
    found: dict[int, list[Attribute]] = {}
    with conn.cursor() as cursor:
        cursor.execute(_ATTRIBUTES, (relations,))
        for relation_id, attnum, changed_by, is_dropped, newest_xid in cursor:
            attribute = Attribute(attnum, changed_by, is_dropped, newest_xid)
            found.setdefault(relation_id, []).append(attribute)
        cursor.execute(_PUBLICATION, {"publication": publication, "relations": relations})
        row = cursor.fetchone()
    assert row is not None
    limited, sends_generated = row
    return {
        relation_id: Attributes(rows, relation_id in limited, sends_generated)
        for relation_id, rows in found.items()
    }


def find_places(
    announced: Sequence[Column],
    current: Relation,
    attributes: Attributes,
    known: Sequence[Relation],
    earlier: Sequence[Relation],
    xid: int,
) -> Places | None:
    """Return the attnums of announced columns; None if they do not follow from the places.

    Args:
        announced: the columns of the message.
        current: the relation as the catalog has it, with all columns.
        attributes: its columns in the catalog.
        known: known versions, oldest first, for the names and types of dropped columns.
        earlier: those of them that are not later than the message.
        xid: id of the announcing transaction.
    """
    if attributes.has_column_list:
        return None
    there = {column.attnum: column for column in current.columns if column.attnum is not None}
    names = {c.attnum: c for version in known for c in version.columns if c.attnum is not None}
    names |= there
    # A column that an earlier version lacks was dropped before, and did not come back.
    lacking = {
        row.attnum
        for row in attributes.rows
        for version in earlier
        if row.attnum <= version.highest_attnum
        and row.attnum not in {column.attnum for column in version.columns}
    }
    order = [
        row
        for row in attributes.rows
        if _is_sent(there.get(row.attnum), attributes)
        if row.attnum in there or row.attnum not in lacking
    ]

    def fits(column: Column, row: Attribute) -> bool:
        """Return whether the column may be that of the row, as far as its type tells."""
        seen = names.get(row.attnum)
        is_same_type = seen is None or _type(seen) == _type(column)
        return is_same_type or (row.attnum in there and row.is_changed_after(xid) is not False)

    def fits_anyhow(column: Column, row: Attribute) -> bool:
        """Return the same, for a change of a transaction that ran at the same time."""
        return row.attnum in there or fits(column, row)

    for condition in (fits, fits_anyhow):
        results = _first(_place(announced, order, there, condition), _MOST_RESULTS)
        if results:
            return _choose(announced, results, names, attributes.rows, xid)
    return None


def _is_sent(column: Column | None, attributes: Attributes) -> bool:
    if column is None or not column.generated:
        return True
    return attributes.sends_generated and column.generated == "s"


def _place(
    announced: Sequence[Column],
    order: Sequence[Attribute],
    there: Mapping[int, Column],
    fits: Callable[[Column, Attribute], bool],
) -> Iterator[_Attnums]:
    """Yield the attnums that the columns may have. Columns after the last one were added later."""
    stack: list[tuple[int, _Attnums]] = [(0, ())]
    while stack:
        index, found = stack.pop()
        if len(found) == len(announced):
            yield found
            continue
        if index == len(order):
            continue
        row = order[index]
        if row.attnum not in there:
            stack.append((index + 1, found))
        if fits(announced[len(found)], row):
            stack.append((index + 1, (*found, row.attnum)))


def _first(results: Iterator[_Attnums], count: int) -> list[_Attnums]:
    return [result for result, _ in zip(results, range(count), strict=False)]


def _choose(
    announced: Sequence[Column],
    results: Sequence[_Attnums],
    known: Mapping[int, Column],
    rows: Sequence[Attribute],
    xid: int,
) -> Places:
    """Return the attnums with the most known columns that agree with the ids of transactions."""

    def score(attnums: _Attnums) -> int:
        return sum(_likeness(c, known.get(n)) for c, n in zip(announced, attnums, strict=True))

    def agrees(attnums: _Attnums) -> bool:
        last = max(attnums, default=0)
        existed = [
            (row.attnum in attnums, row.is_changed_after(xid))
            for row in rows
            if row.is_dropped and row.attnum <= last
        ]
        return all(is_after in (None, is_there) for is_there, is_after in existed)

    highest = max(map(score, results))
    best = [attnums for attnums in results if score(attnums) == highest]
    agreeing = [attnums for attnums in results if agrees(attnums)]
    chosen = [attnums for attnums in best if agrees(attnums)] or agreeing or best
    is_certain = len(results) == 1 or (len(best) == 1 and best[0] in agreeing)
    return Places(chosen[0], is_certain)


def _likeness(announced: Column, known: Column | None) -> int:
    """Return 2 for the known name and type, 1 for a column that nothing is known of, else 0."""
    if known is None:
        return 1
    return 2 * ((known.name, _type(known)) == (announced.name, _type(announced)))


def _type(column: Column) -> tuple[int, int]:
    return column.type_oid, column.typmod
