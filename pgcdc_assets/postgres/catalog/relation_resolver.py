"""Completion of the relations that a stream announces, from the catalog.

The catalog may be newer than the message: capture may read a backlog long after an ALTER TABLE.
The catalog is never older: the transaction of the message must be visible (see
`visible_transactions`).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.catalog.column_places import Attributes, find_places, read_attributes
from pgcdc_assets.postgres.catalog.publication import read_members
from pgcdc_assets.postgres.catalog.relations import complete_type, read_relations
from pgcdc_assets.postgres.catalog.types import ResolvedType, resolve_types
from pgcdc_assets.postgres.catalog.visible_transactions import (
    VisibleTransactions,
    wait_until_visible,
)
from pgcdc_assets.postgres.connection import ConnectionSettings, sorted_failures
from pgcdc_assets.postgres.encodings import CONVERSION_ERRORS, read_legible
from pgcdc_assets.postgres.wal.positions import read_current_lsn
from pgcdc_assets.protocol.relation import Column, Relation

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

_PURPOSE = "lease"

_DOUBT = (
    "A column was dropped, and another one may have its name: which of the two the values of a "
    "transaction belong to is not certain."
)

# Types that print each value as it is, so that ALTER TYPE does not change a text.
_TEXTS = frozenset({"varchar", "text"})

# A column of which the catalog has no facts.
_UNKNOWN = Column("", 0)


def complete_relation(
    announced: Relation,
    catalog: Mapping[int, Relation],
    types: Mapping[int, ResolvedType] | None = None,
    attnums: Sequence[int | None] | None = None,
) -> Relation:
    """Return an announced relation completed from the catalog.

    The catalog may be newer than the message, because capture may read a backlog long after an
    ALTER TABLE. Names, types and keys therefore come from the message. A column without a certain
    counterpart in the catalog has no attnum.

    Args:
        announced: the relation of the message.
        catalog: relations by OID with all their columns.
        types: resolved types by OID, for columns whose type has changed since the message.
        attnums: the attnums of the announced columns; None: those of the columns' names.
    """
    current = catalog.get(announced.relation_id)
    known = () if current is None else current.columns
    numbered = {column.attnum: column for column in known}
    alike = {(column.type_oid, column.typmod): column for column in known}
    if attnums is None:
        attnums = _match_attnums(announced.columns, {column.name: column for column in known})
    columns = []
    for column, attnum in zip(announced.columns, attnums, strict=True):
        # Of a column that was dropped and added again, the catalog has the later column's facts.
        facts = _UNKNOWN if attnum is None else numbered.get(attnum, _UNKNOWN)
        typed = alike.get((column.type_oid, column.typmod))
        if typed is not None:
            completed = replace(typed, name=column.name, is_key=column.is_key, attnum=attnum)
        else:
            completed = complete_type(replace(column, attnum=attnum), types or {})
        columns.append(
            replace(
                completed,
                missing=facts.missing if _has_same_text(completed, facts) else None,
                has_default=facts.has_default,
                not_null=facts.not_null,
                generated=facts.generated,
                identity=facts.identity,
            )
        )
    return replace(
        announced,
        columns=tuple(columns),
        primary_key=_primary_key(columns, current),
        attribute_count=_attribute_count(columns, current),
    )


@dataclass(frozen=True, slots=True)
class Completion:
    """An announced relation, completed.

    Attributes:
        relation: the relation.
        doubt: why other columns of the catalog may be meant, as a sentence; empty if this is
            certain.
    """

    relation: Relation
    doubt: str = ""


class CatalogResolver:
    """Resolver of the relations that a stream announces.

    The catalog may be newer than the message, because capture may read a backlog long after an
    ALTER TABLE. The places of the columns decide which columns are meant (see `column_places`).

    Args:
        settings: the source database, for sentences of errors.
        conn: a connection to the database in autocommit mode.
        publication: the publication that the stream sends.
        known: function that returns the known versions of a relation by OID, oldest first, each
            with an LSN from which on it was so.

    Attributes:
        warnings: counts of names that cannot be read, by description.
    """

    def __init__(
        self,
        settings: ConnectionSettings,
        conn: Connection,
        publication: str,
        known: Callable[[int], Sequence[tuple[Lsn, Relation]]] = lambda relation_id: (),
    ) -> None:
        self._settings = settings
        self._conn = conn
        self._publication = publication
        self._known = known
        self._catalog: dict[int, _CatalogEntry] = {}
        self.warnings: Counter[str] = Counter()

    def complete(self, announced: Relation, commit_lsn: Lsn, xid: int) -> Completion:
        """Return one announced relation, completed.

        Args:
            announced: the relation of the message.
            commit_lsn: commit LSN of the announcing transaction.
            xid: id of the announcing transaction.

        Raises:
            ConnectionLost: the server went away.
            TransientError: the transaction does not become visible.
        """
        oid = announced.relation_id
        entry = self._catalog.get(oid)
        if (
            entry is None
            or entry.lsn <= commit_lsn
            or not entry.visible.has(xid)
            or not _has_types(announced, entry.relation)
        ):
            with sorted_failures(self._settings, _PURPOSE):
                entry = self._read(self._conn, announced, xid)
        versions = self._known(oid)
        current = entry.relation
        is_partitioned = any(
            each.is_partitioned for each in (current, *(version for _, version in versions)) if each
        )
        announced = replace(announced, is_partitioned=is_partitioned)
        known = [replace(version, is_partitioned=is_partitioned) for _, version in versions]
        same = [version for version in known if version.as_announced() == announced]
        if current is None:
            return Completion(same[-1] if same else complete_relation(announced, {}, entry.types))
        earlier = [v for (lsn, _), v in zip(versions, known, strict=True) if lsn <= commit_lsn]
        places = find_places(announced.columns, current, entry.attributes, known, earlier, xid)
        attnums = None if places is None else places.attnums
        completed = complete_relation(announced, {oid: current}, entry.types, attnums)
        if places is None and same and None in _attnums(completed):
            return Completion(same[-1])
        for version in known:
            completed = completed.with_missing_of(version)
        highest = max((column.attnum or 0 for column in completed.columns), default=0)
        if entry.attributes.may_exceed(highest, xid):
            completed = replace(completed, attribute_count=None)
        completed = replace(
            completed, unsent_identity=_unsent_identity(completed, current, earlier)
        )
        doubt = "" if places is None or places.is_certain else _DOUBT
        if not all(column.type for column in completed.columns):
            for version in reversed(same):
                if _attnums(version) == _attnums(completed):
                    return Completion(version, doubt)
        return Completion(completed, doubt)

    def _read(self, conn: Connection, announced: Relation, xid: int) -> _CatalogEntry:
        """Read the entry of a relation. The first call reads all tables of the publication."""
        visible = wait_until_visible(conn, xid)
        # Read the LSN first: a transaction that commits below the LSN wrote before any DDL that
        # the catalog queries miss.
        lsn = read_current_lsn(conn)
        wanted = {announced.relation_id}
        if not self._catalog:
            with contextlib.suppress(*CONVERSION_ERRORS):
                members = read_members(conn, self._publication)
                wanted |= {member.relation_id for member in members}
        # A relation with an illegible name is completed like a relation that the catalog no longer
        # has, so it does not stop the other tables.
        relations, illegible = read_legible(partial(read_relations, conn), list(wanted))
        for oid in illegible:
            self.warnings[f"relation {oid}: a name is not UTF-8"] += 1
        attributes = read_attributes(conn, self._publication, list(relations))
        self._catalog |= {
            oid: _CatalogEntry(lsn, visible, relations.get(oid), attributes.get(oid, Attributes()))
            for oid in wanted
        }
        entry = self._catalog[announced.relation_id]
        if not _has_types(announced, entry.relation):
            with contextlib.suppress(*CONVERSION_ERRORS):
                types = resolve_types(conn, (c.type_oid for c in announced.columns))
                entry = replace(entry, types=types)
        return entry


@dataclass(frozen=True)
class _CatalogEntry:
    """The catalog's state of a relation.

    Attributes:
        lsn: the server's current LSN before the catalog query.
        visible: the transactions that the query sees, and maybe later ones.
        relation: None if the relation does not exist.
        attributes: its columns, dropped ones included.
        types: types of announced columns that the relation no longer has.
    """

    lsn: Lsn
    visible: VisibleTransactions
    relation: Relation | None
    attributes: Attributes = field(default_factory=Attributes)
    types: Mapping[int, ResolvedType] = field(default_factory=dict)


def _primary_key(announced: Sequence[Column], current: Relation | None) -> tuple[str, ...]:
    """Return the announced names of the primary key's columns; empty if one is not announced."""
    if current is None:
        return ()
    attnums = {column.name: column.attnum for column in current.columns}
    names = {column.attnum: column.name for column in announced if column.attnum is not None}
    unmatched = {column.name for column in announced if column.attnum is None}
    key = tuple(
        name if name in unmatched else names.get(attnums.get(name) or 0, "")
        for name in current.primary_key
    )
    return key if all(key) else ()


def _unsent_identity(
    announced: Relation, current: Relation, earlier: Sequence[Relation]
) -> tuple[str, ...]:
    """Return the columns of the identity's index that existed at the message and are not announced.

    The flags of the announced columns do not tell whether the index has further columns.
    """
    sent = {column.attnum for column in announced.columns}
    if None in sent or announced.has_full_identity or current.has_full_identity:
        return ()
    highest = max((version.highest_attnum for version in (announced, *earlier)), default=0)
    return tuple(
        column.name
        for column in current.columns
        if column.is_key and column.attnum not in sent and (column.attnum or 0) <= highest
    )


def _has_same_text(announced: Column, known: Column) -> bool:
    """Return whether `attmissingval` has the same text in the type of the message.

    An ALTER TYPE that rewrites the table clears `attmissingval`. One that does not, such as a
    longer varchar, leaves each value and its text as they are, if both types print values alike.
    """
    types = {announced.base_type, known.base_type}
    return announced.type_oid == known.type_oid or types <= _TEXTS


def _attribute_count(announced: Sequence[Column], current: Relation | None) -> int | None:
    """Return `relnatts` at the time of the message; None if it is unknown.

    A column of the catalog beyond the announced columns was added after the message, or is not
    published.
    """
    if current is None:
        return None
    highest = max((column.attnum or 0 for column in announced), default=0)
    if any((column.attnum or 0) > highest for column in current.columns):
        return None
    return current.attribute_count


def _has_types(announced: Relation, current: Relation | None) -> bool:
    """Return whether `current` has resolved types for all announced columns."""
    known = () if current is None else current.columns
    typed = {(c.name, c.type_oid, c.typmod) for c in known if c.type is not None}
    return all((c.name, c.type_oid, c.typmod) in typed for c in announced.columns)


def _attnums(relation: Relation) -> list[int | None]:
    return [column.attnum for column in relation.columns]


def _match_attnums(announced: Sequence[Column], known: Mapping[str, Column]) -> list[int | None]:
    """Return each announced column's attnum, or None for a column without a certain match.

    A Relation message lists columns in order of attnum. A column with the announced name but with
    an attnum out of order was dropped and added again: the column is not the announced column. The
    attnums between two certain columns are certain as well if there are exactly as many attnums as
    columns: a renamed or dropped column keeps its attnum.
    """
    found = [known[column.name].attnum if column.name in known else None for column in announced]
    lowest: int | None = None
    for index in range(len(found) - 1, -1, -1):
        attnum = found[index]
        if attnum is not None and lowest is not None and attnum > lowest:
            found[index] = None
        elif attnum is not None:
            lowest = attnum
    index = 0
    while index < len(found):
        if found[index] is not None:
            index += 1
            continue
        end = index
        while end < len(found) and found[end] is None:
            end += 1
        before = found[index - 1] if index else 0
        after = found[end] if end < len(found) else None
        if before is not None and after is not None and after - before - 1 == end - index:
            for position in range(index, end):
                found[position] = before + 1 + position - index
        index = end
    return found
