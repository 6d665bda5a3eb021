"""Completion of the relations that a stream announces, from the catalog.

The catalog may be newer than the message: capture may read a backlog long after an ALTER TABLE.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

import psycopg2.errors

from pgcdc_assets.errors import ConnectionLost
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.catalog import complete_type, read_relations
from pgcdc_assets.postgres.connection import ConnectionSettings, connect, sorted_failures
from pgcdc_assets.postgres.publication import read_members
from pgcdc_assets.postgres.type_catalog import ResolvedType, resolve_types
from pgcdc_assets.postgres.wal import read_current_lsn
from pgcdc_assets.protocol.relation import Column, Relation

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

_PURPOSE = "catalog"

_Answer = TypeVar("_Answer")

# A column of which the catalog has no facts.
_UNKNOWN = Column("", 0)


def complete_relation(
    announced: Relation,
    catalog: Mapping[int, Relation],
    types: Mapping[int, ResolvedType] | None = None,
) -> Relation:
    """Return an announced relation completed from the catalog.

    The catalog may be newer than the message, because capture may read a backlog long after an
    ALTER TABLE. Names, types and keys therefore come from the message. A column without a certain
    counterpart in the catalog has no attnum.

    Args:
        announced: the relation of the message.
        catalog: relations by OID with all their columns.
        types: resolved types by OID, for columns whose type has changed since the message.
    """
    current = catalog.get(announced.relation_id)
    known = {} if current is None else {column.name: column for column in current.columns}
    numbered = {column.attnum: column for column in known.values()}
    attnums = _match_attnums(announced.columns, known)
    columns = []
    for column, attnum in zip(announced.columns, attnums, strict=True):
        same = known.get(column.name)
        missing = None
        if same is not None and (same.type_oid, same.typmod) == (column.type_oid, column.typmod):
            completed = replace(same, is_key=column.is_key, attnum=attnum)
            missing = same.missing if attnum == same.attnum else None
        else:
            completed = complete_type(replace(column, attnum=attnum), types or {})
        # Of a column that was dropped and added again, the catalog has the later column's facts.
        facts = _UNKNOWN if attnum is None else numbered.get(attnum, _UNKNOWN)
        columns.append(
            replace(
                completed,
                missing=missing,
                has_default=facts.has_default,
                not_null=facts.not_null,
                generated=facts.generated,
                identity=facts.identity,
            )
        )
    primary_key = () if current is None else current.primary_key
    if not set(primary_key) <= {column.name for column in columns}:
        primary_key = ()
    return replace(
        announced,
        columns=tuple(columns),
        primary_key=primary_key,
        attribute_count=_attribute_count(columns, current),
    )


class CatalogResolver:
    """Resolver of the relations that a stream announces, with a connection of its own.

    The catalog may be newer than the message, because capture may read a backlog long after an
    ALTER TABLE. The resolver then prefers a registered version with the announced names and types,
    if the columns of this version still existed when the announcing transaction wrote.

    Args:
        settings: the source database.
        publication: the publication that the stream sends.
        registered: function that returns a relation's registered versions by OID, oldest first.

    Attributes:
        warnings: counts of uncertain results, by description.
    """

    def __init__(
        self,
        settings: ConnectionSettings,
        publication: str,
        registered: Callable[[int], Sequence[Relation]] = lambda relation_id: (),
    ) -> None:
        self._settings = settings
        self._publication = publication
        self._registered = registered
        self._catalog: dict[int, _CatalogEntry] = {}
        self._connection: Connection | None = None
        self.warnings: Counter[str] = Counter()

    def complete(self, announced: Relation, commit_lsn: Lsn, xid: int) -> Relation:
        """Return one announced relation, completed.

        Args:
            announced: the relation of the message.
            commit_lsn: commit LSN of the announcing transaction.
            xid: id of the announcing transaction.

        Raises:
            ConnectionLost: the server is down, or went away.
        """
        oid = announced.relation_id
        entry = self._catalog.get(oid)
        if entry is None or entry.lsn <= commit_lsn or not _has_types(announced, entry.relation):
            entry = self._query(lambda conn: self._read(conn, announced))
        catalog = {} if entry.relation is None else {oid: entry.relation}
        completed = complete_relation(announced, catalog, entry.types)
        for version in reversed(self._registered(oid)):
            if _as_announced(version) != announced:
                continue
            if _attnums(version) == _attnums(completed):
                return completed if all(c.type for c in completed.columns) else version
            if self._was_valid(version, completed, entry.relation, xid):
                return version
        return completed

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _was_valid(
        self, version: Relation, completed: Relation, current: Relation | None, xid: int
    ) -> bool:
        """Return whether a transaction wrote while a table had the columns of `version`.

        ALTER TABLE waits for transactions that have written to the table. A transaction that wrote
        before the ALTER TABLE therefore has a lower id. The `xmin` of a row of pg_attribute is the
        id of the transaction that last changed the column.
        """
        if current is None:
            return True
        there = {column.attnum: column.name for column in current.columns}
        moved = [c for c in version.columns if c.attnum and there.get(c.attnum) != c.name]
        changed_by = self._query(lambda conn: _read_changers(conn, version.relation_id))
        is_certain = None not in _attnums(completed)
        for column in moved:
            changer = changed_by.get(column.attnum or 0)
            if changer is None or _precedes(xid, changer):
                continue
            if column.attnum not in there or is_certain:
                if xid == changer:
                    self.warnings[
                        f"{version.qualified_name}: one transaction altered the table and wrote "
                        "rows; which of two versions of the columns the rows have is not certain"
                    ] += 1
                return False
        return True

    def _read(self, conn: Connection, announced: Relation) -> _CatalogEntry:
        """Read the entry of a relation. The first call reads all tables of the publication."""
        # Read the LSN first: a transaction that commits below the LSN wrote before any DDL that
        # the catalog queries miss.
        lsn = read_current_lsn(conn)
        wanted = {announced.relation_id}
        try:
            if not self._catalog:
                members = read_members(conn, self._publication)
                wanted |= {member.relation_id for member in members}
            relations = read_relations(conn, wanted)
        except psycopg2.errors.CharacterNotInRepertoire:
            relations = self._read_legible(conn, wanted)
        self._catalog |= {oid: _CatalogEntry(lsn, relations.get(oid)) for oid in wanted}
        entry = self._catalog[announced.relation_id]
        if not _has_types(announced, entry.relation):
            with contextlib.suppress(psycopg2.errors.CharacterNotInRepertoire):
                types = resolve_types(conn, (c.type_oid for c in announced.columns))
                entry = replace(entry, types=types)
        return entry

    def _read_legible(self, conn: Connection, wanted: Iterable[int]) -> dict[int, Relation]:
        """Read the relations one by one, without those that have a name that is not UTF-8.

        Such names exist in a database of encoding SQL_ASCII. These relations are completed like
        relations that the catalog no longer has, so they do not stop the other tables.
        """
        found: dict[int, Relation] = {}
        for relation_id in wanted:
            try:
                found |= read_relations(conn, [relation_id])
            except psycopg2.errors.CharacterNotInRepertoire:
                self.warnings[f"relation {relation_id}: a name is not UTF-8"] += 1
        return found

    def _query(self, question: Callable[[Connection], _Answer]) -> _Answer:
        """Query over the open connection, and repeat over a new connection after its loss."""
        if self._connection is not None:
            try:
                with sorted_failures(self._settings, _PURPOSE):
                    return question(self._connection)
            except ConnectionLost:
                self.close()
        self._connection = connect(self._settings, _PURPOSE)
        with sorted_failures(self._settings, _PURPOSE):
            return question(self._connection)


@dataclass(frozen=True)
class _CatalogEntry:
    """The catalog's state of a relation.

    Attributes:
        lsn: the server's current LSN before the catalog query.
        relation: None if the relation does not exist.
        types: types of announced columns that the relation no longer has.
    """

    lsn: Lsn
    relation: Relation | None
    types: Mapping[int, ResolvedType] = field(default_factory=dict)


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


def _as_announced(relation: Relation) -> Relation:
    """Return a relation reduced to the fields of its Relation message."""
    columns = tuple(Column(c.name, c.type_oid, c.typmod, c.is_key) for c in relation.columns)
    return replace(relation, columns=columns, primary_key=())


def _attnums(relation: Relation) -> list[int | None]:
    return [column.attnum for column in relation.columns]


def _read_changers(conn: Connection, relation_id: int) -> dict[int, int]:
    """Return the id of the transaction that last changed each column, by attnum, dropped or not."""
    with conn.cursor() as cursor:
        cursor.execute(
            "select attnum, xmin::text::bigint from pg_attribute where attrelid = %s::oid "
            "and attnum > 0",
            (relation_id,),
        )
        return dict(cursor.fetchall())


def _precedes(xid: int, other: int) -> bool:
    """Return whether `xid` is older, modulo 2^32 (TransactionIdPrecedes in transam.c)."""
    return (xid - other) % 2**32 >= 2**31


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
