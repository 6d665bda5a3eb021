"""The columns of the catalog that an announced relation has, found by their places.

A Relation message has names and types, and no attnums. Its columns are in the order of their
attnums. A table never reuses an attnum, and a dropped column keeps its row in `pg_attribute`. At
any time, a table has the columns with the attnums 1 to n, without the columns that were dropped by
then. The announced columns therefore have certain attnums, whatever their names are now, if it is
known which of the dropped columns existed at that time.

ALTER TABLE waits for the transactions that have written to the table. If an earlier version lacks a
dropped column, the column did not exist. Otherwise there are two kinds of evidence: names and
types, and whether the transaction that dropped the column (`xmin` of its row) has a higher id than
the announcing transaction. Neither is a proof: a column can get the name of another column, and
transaction ids are not in the order of commits. If the two do not agree on one result, the result
is uncertain.

A column list of the publication has attnums, and follows a renamed column. The announced columns
are those of the list, if an earlier version had the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

    from pgcdc_assets.protocol.relation import Column, Relation

_Attnums = tuple[int, ...]

# Name, type and typmod.
_Facts = tuple[str, int, int]

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
select coalesce((select jsonb_object_agg(l.relation::bigint, case when l.relation = l.oid
                                         then to_jsonb(r) -> 'prattrs' end
                                         order by l.relation = l.oid)
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
        has_column_list: the publication has a column list for the relation or an ancestor, so the
            places among all columns tell nothing.
        listed: the attnums of the relation's own column list.
        sends_generated: the publication sends stored generated columns.
    """

    rows: Sequence[Attribute] = ()
    has_column_list: bool = False
    listed: frozenset[int] = frozenset()
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
    lists, sends_generated = row
    return {
        relation_id: Attributes(
            rows,
            str(relation_id) in lists,
            frozenset(lists.get(str(relation_id)) or ()),
            sends_generated,
        )
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
        return _find_listed(announced, attributes.listed, known, earlier)
    there = {column.attnum: column for column in current.columns if column.attnum is not None}
    if _sent_others(announced, there.values(), attributes, earlier):
        return None
    facts: dict[int, set[_Facts]] = {}
    for version in (*known, current):
        for column in version.columns:
            if column.attnum is not None:
                facts.setdefault(column.attnum, set()).add(_facts(column))
    # A column that an earlier version lacks was dropped before, and did not come back.
    lacking: set[int] = set()
    for version in earlier:
        had, highest = {column.attnum for column in version.columns}, version.highest_attnum
        lacking.update(
            row.attnum for row in attributes.rows if row.attnum <= highest and row.attnum not in had
        )
    order = [
        row
        for row in attributes.rows
        if _is_sent(there.get(row.attnum), attributes)
        if row.attnum in there or row.attnum not in lacking
    ]

    def fits(column: Column, row: Attribute) -> bool:
        """Return whether the column may be that of the row, as far as its type tells."""
        types = {each[1:] for each in facts.get(row.attnum, ())}
        is_altered = row.attnum in there and row.is_changed_after(xid) is not False
        return is_altered or not types or _facts(column)[1:] in types

    def fits_anyhow(column: Column, row: Attribute) -> bool:
        """Return the same, if the type was altered without being announced."""
        return True

    def existed(row: Attribute) -> bool | None:
        """Return whether the column existed; None if it is not known."""
        return True if row.attnum in there else None

    def existed_by_id(row: Attribute) -> bool | None:
        """Return the same by the ids of the transactions."""
        return True if row.attnum in there else row.is_changed_after(xid)

    for condition in (fits, fits_anyhow):
        search = _Search(announced, order, facts, condition)
        best, agreeing = search.find(existed), search.find(existed_by_id)
        if best is not None:
            agrees = agreeing is not None and agreeing.known == best.known
            is_certain = best.is_only or (agrees and not best.has_rival)
            return Places((agreeing or best).attnums, is_certain)
    return None


def _find_listed(
    announced: Sequence[Column],
    listed: Set[int],
    known: Sequence[Relation],
    earlier: Sequence[Relation],
) -> Places | None:
    """Return the attnums of the columns of a column list; None if the names decide.

    A generated column may be in the list and not be sent. The list was altered if the earlier
    versions have other columns than those of the list.
    """
    facts = [_facts(column) for column in announced]
    for version in (*reversed(earlier), *reversed(known)):
        attnums = tuple(column.attnum or 0 for column in version.columns)
        if [_facts(column) for column in version.columns] == facts and listed >= set(attnums):
            return Places(attnums, is_certain=True)
    if earlier:
        attnums = tuple(column.attnum or 0 for column in earlier[-1].columns)
        if len(attnums) == len(announced) and listed >= set(attnums):
            return Places(attnums, is_certain=True)
    return None


def _sent_others(
    announced: Sequence[Column],
    there: Collection[Column],
    attributes: Attributes,
    earlier: Sequence[Relation],
) -> bool:
    """Return whether the publication sent other columns of the table, so places tell nothing.

    The publication had a column list then, or did or did not send generated columns, and was
    altered.
    """
    unsent = {_facts(column) for column in there if not _is_sent(column, attributes)}
    if any(_facts(column) in unsent for column in announced):
        return True
    known = max((version.highest_attnum for version in earlier), default=0)
    old = [c for c in there if (c.attnum or 0) <= known and _is_sent(c, attributes)]
    return len(old) > len(announced)


def _is_sent(column: Column | None, attributes: Attributes) -> bool:
    if column is None or not column.generated:
        return True
    return attributes.sends_generated and column.generated == "s"


@dataclass(frozen=True, slots=True)
class _Found:
    """The best of the possible attnums of some columns.

    Attributes:
        known: those of columns that are known to have had the announced name and type.
        has_rival: other attnums have as many known columns, and not the same.
        is_only: no other attnums are possible.
    """

    attnums: _Attnums
    known: _Attnums = ()
    has_rival: bool = False
    is_only: bool = True


@dataclass(frozen=True, slots=True)
class _Search:
    """The search for the attnums of announced columns.

    Attributes:
        order: the columns that may be meant, in order.
        facts: the names and types that a column is known to have had, by attnum.
        fits: whether a column may be that of a row.
    """

    announced: Sequence[Column]
    order: Sequence[Attribute]
    facts: Mapping[int, set[_Facts]]
    fits: Callable[[Column, Attribute], bool]

    def find(self, existed: Callable[[Attribute], bool | None]) -> _Found | None:
        """Return the attnums with the most known columns, if any are possible.

        A column that existed is announced, if it is not after the last announced one: those were
        added later. `found[i]` is the result for the columns from `i` on, in the rows so far, from
        the last row back to the first. A column is in no earlier row than its own place, and the
        columns after it have enough rows behind it: of a table without dropped columns, this leaves
        one column for each row.
        """
        end, count = len(self.announced), len(self.order)
        found: list[_Found | None] = [None] * end + [_Found(())]
        for place in range(count - 1, -1, -1):
            row = self.order[place]
            there = existed(row)
            # `found[i]` and `found[i + 1]` are still those of the row behind.
            for i in range(max(0, end - (count - place)), min(end, place + 1)):
                found[i] = _better(
                    None if there is False else self._placed(i, row, found[i + 1]),
                    None if there is True else found[i],
                )
        return found[0]

    def _placed(self, index: int, row: Attribute, rest: _Found | None) -> _Found | None:
        """Return the result of the later columns with one more column before these."""
        column = self.announced[index]
        if rest is None or not self.fits(column, row):
            return None
        is_known = _facts(column) in self.facts.get(row.attnum, ())
        return replace(
            rest,
            attnums=(row.attnum, *rest.attnums),
            known=(row.attnum, *rest.known) if is_known else rest.known,
        )


def _better(one: _Found | None, other: _Found | None) -> _Found | None:
    if one is None or other is None:
        return one or other
    best, rival = sorted((one, other), key=lambda found: len(found.known), reverse=True)
    is_tie = len(best.known) == len(rival.known)
    has_rival = best.has_rival or (is_tie and (rival.has_rival or best.known != rival.known))
    return replace(best, has_rival=has_rival, is_only=False)


def _facts(column: Column) -> _Facts:
    return column.name, column.type_oid, column.typmod
