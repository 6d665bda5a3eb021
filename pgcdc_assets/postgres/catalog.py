"""The catalog's view of tables: everything about a relation that pgoutput's Relation message leaves
out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from pgcdc_assets.errors import ConnectionLost
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.connection import ConnectionSettings, connect, sorted_failures
from pgcdc_assets.postgres.publication import read_members, read_publication
from pgcdc_assets.postgres.type_catalog import ResolvedType, resolve_types
from pgcdc_assets.postgres.wal import read_current_lsn
from pgcdc_assets.protocol.relation import Column, Relation

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

__all__ = [
    "CatalogResolver",
    "PublishedTable",
    "complete_relation",
    "published_relations",
    "published_tables",
    "read_relations",
    "resolve_types",
]

_PURPOSE = "catalog"

_Answer = TypeVar("_Answer")

# The identity's columns as RelationGetIndexList() in relcache.c finds them: an index that is valid
# and not deferrable. A deferrable primary key is a primary key all the same, but no replica
# identity.
_RELATIONS = """
select c.oid::bigint, n.nspname, c.relname, c.relreplident::text,
       coalesce((select array_agg(k.attnum::int)
                   from pg_index i cross join unnest(i.indkey) with ordinality k(attnum, position)
                  where i.indrelid = c.oid and i.indisvalid and i.indimmediate
                    and k.position <= i.indnkeyatts
                    and case c.relreplident when 'd' then i.indisprimary
                                            when 'i' then i.indisreplident
                                            else false end), '{}'),
       coalesce((select array_agg(a.attname::text order by k.position)
                   from pg_index i
                  cross join unnest(i.indkey) with ordinality k(attnum, position)
                   join pg_attribute a on a.attrelid = c.oid and a.attnum = k.attnum
                  where i.indrelid = c.oid and i.indisprimary
                    and k.position <= i.indnkeyatts), '{}'),
       c.relnatts
  from pg_class c
  join pg_namespace n on n.oid = c.relnamespace
 where c.oid = any(%s::bigint[]::oid[])
"""

# attmissingval is an array of one element.
_COLUMNS = """
select a.attrelid::bigint, a.attname, a.atttypid::bigint, a.atttypmod, a.attnum,
       a.attgenerated::text, (a.attmissingval::text::text[])[1]
  from pg_attribute a
 where a.attrelid = any(%s::bigint[]::oid[]) and a.attnum > 0 and not a.attisdropped
 order by a.attrelid, a.attnum
"""


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """A relation as the publication sends it, and what copying it needs.

    Attributes:
        is_partitioned: its rows are in partitions; else only rows of the table itself are its own.
        row_filter: SQL text of the publication's WHERE clause.
        publication: the publication's name.
    """

    relation: Relation
    is_partitioned: bool = False
    row_filter: str | None = None
    publication: str = ""


def published_tables(conn: Connection, publication: str) -> list[PublishedTable]:
    """List a publication's tables with the columns it sends, by schema and name.

    Raises:
        ConfigurationError: the publication does not exist.
    """
    read_publication(conn, publication)
    members = read_members(conn, publication)
    columns = {member.relation_id: member.columns for member in members}
    # Before PG 18 pgoutput never sends generated columns, though PG 15's view lists them.
    sends_generated = conn.server_version >= 180000

    def is_sent(relation_id: int, name: str, generated: str) -> bool:
        listed = columns[relation_id]
        return (listed is None or name in listed) and (sends_generated or not generated)

    relations = read_relations(conn, columns, is_sent)
    return [
        PublishedTable(
            relations[member.relation_id], member.kind == "p", member.row_filter, publication
        )
        for member in members
        if member.relation_id in relations
    ]


def published_relations(conn: Connection, publication: str) -> list[Relation]:
    """List a publication's relations with the columns it sends.

    Raises:
        ConfigurationError: the publication does not exist.
    """
    return [table.relation for table in published_tables(conn, publication)]


def read_relations(
    conn: Connection,
    relation_ids: Iterable[int],
    is_kept: Callable[[int, str, str], bool] = lambda relation_id, name, generated: True,
) -> dict[int, Relation]:
    """Read relations by OID, those that exist.

    Args:
        is_kept: chooses columns by OID, name and `attgenerated`; by default all are kept.
    """
    wanted = sorted(set(relation_ids))
    with conn.cursor() as cursor:
        cursor.execute(_RELATIONS, (wanted,))
        heads = cursor.fetchall()
        cursor.execute(_COLUMNS, (wanted,))
        attributes = cursor.fetchall()
    types = resolve_types(conn, (attribute[2] for attribute in attributes))
    relations: dict[int, Relation] = {}
    for oid, schema, table, identity, identity_attnums, primary_key, attribute_count in heads:
        kept: list[Column] = []
        for owner, name, type_oid, typmod, attnum, generated, missing in attributes:
            if owner != oid or not is_kept(oid, name, generated):
                continue
            is_key = identity == "f" or attnum in identity_attnums
            column = Column(name, type_oid, typmod, is_key, attnum, missing=missing)
            kept.append(_complete_type(column, types))
        relations[oid] = Relation(
            oid, schema, table, identity, tuple(kept), tuple(primary_key), attribute_count
        )
    return relations


def complete_relation(
    announced: Relation,
    catalog: Mapping[int, Relation],
    types: Mapping[int, ResolvedType] | None = None,
) -> Relation:
    """Add to an announced relation what the catalog knows.

    The catalog may be newer than the message: a backlog is read long after a change of the table.
    So the message decides names, types and keys, and a column that cannot be told for sure has no
    attnum.

    Args:
        catalog: relations by OID with all their columns.
        types: resolved types by OID, for columns whose type is not the catalog's any more.
    """
    current = catalog.get(announced.relation_id)
    known = {} if current is None else {column.name: column for column in current.columns}
    attnums = _match_attnums(announced.columns, known)
    columns = []
    for column, attnum in zip(announced.columns, attnums, strict=True):
        same = known.get(column.name)
        if same is not None and (same.type_oid, same.typmod) == (column.type_oid, column.typmod):
            missing = same.missing if attnum == same.attnum else None
            columns.append(replace(same, is_key=column.is_key, attnum=attnum, missing=missing))
        else:
            columns.append(_complete_type(replace(column, attnum=attnum), types or {}))
    primary_key = () if current is None else current.primary_key
    if not set(primary_key) <= {column.name for column in columns}:
        primary_key = ()
    return replace(
        announced,
        columns=tuple(columns),
        primary_key=primary_key,
        attribute_count=None if current is None else current.attribute_count,
    )


class CatalogResolver:
    """Completes the relations that a stream announces, over one connection of its own.

    A backlog is read long after a change of a table, so the catalog may be newer than the message.
    A registered version with the announced names and types is then preferred to the catalog, as far
    as its columns still existed when the announcing transaction wrote.

    Args:
        registered: the registered versions of a relation by its OID, oldest first.

    Attributes:
        warnings: how often something could not be told for sure, by its description.
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
        """Complete one announced relation.

        Args:
            commit_lsn: where the transaction commits that announces it.
            xid: that transaction's.

        Raises:
            ConnectionLost: the server is down, or went away.
        """
        oid = announced.relation_id
        entry = self._catalog.get(oid)
        if entry is None or entry.lsn <= commit_lsn or not _has_types(announced, entry.relation):
            entry = self._ask(lambda conn: self._read(conn, announced))
        catalog = {} if entry.relation is None else {oid: entry.relation}
        completed = complete_relation(announced, catalog, entry.types)
        for version in reversed(self._registered(oid)):
            if _as_announced(version) != announced:
                continue
            if _attnums(version) == _attnums(completed):
                return completed if all(c.type for c in completed.columns) else version
            if self._was_so(version, completed, entry.relation, xid):
                return version
        return completed

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _was_so(
        self, version: Relation, completed: Relation, current: Relation | None, xid: int
    ) -> bool:
        """Say whether a transaction wrote while a table's columns were those of a version.

        DDL waits for the transactions that write to its table. So a transaction that wrote before
        the DDL has the lower id, and the catalog keeps the id of what last changed a column.
        """
        if current is None:
            return True
        there = {column.attnum: column.name for column in current.columns}
        moved = [c for c in version.columns if c.attnum and there.get(c.attnum) != c.name]
        changed_by = self._ask(lambda conn: _read_changers(conn, version.relation_id))
        is_certain = None not in _attnums(completed)
        for column in moved:
            changer = changed_by.get(column.attnum or 0)
            if changer is None or _precedes(xid, changer):
                continue
            if column.attnum not in there or is_certain:
                if xid == changer:
                    self.warnings[
                        f"{version.qualified_name}: one transaction altered the table and wrote to "
                        "it; which of two shapes its rows have is not certain"
                    ] += 1
                return False
        return True

    def _read(self, conn: Connection, announced: Relation) -> _CatalogEntry:
        """Read a relation's entry; the first time those of all the publication's tables."""
        # In this order: what commits below the LSN cannot have been written after later DDL.
        lsn = read_current_lsn(conn)
        wanted = {announced.relation_id}
        if not self._catalog:
            wanted |= {member.relation_id for member in read_members(conn, self._publication)}
        relations = read_relations(conn, wanted)
        self._catalog |= {oid: _CatalogEntry(lsn, relations.get(oid)) for oid in wanted}
        entry = self._catalog[announced.relation_id]
        if not _has_types(announced, entry.relation):
            types = resolve_types(conn, (c.type_oid for c in announced.columns))
            entry = replace(entry, types=types)
        return entry

    def _ask(self, question: Callable[[Connection], _Answer]) -> _Answer:
        """Ask over the open connection; once more over a new one where the server ended it."""
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
    """What the catalog said of a relation.

    Attributes:
        lsn: of the server before it was asked.
        relation: None when it does not exist.
        types: of announced columns that the relation does not have.
    """

    lsn: Lsn
    relation: Relation | None
    types: Mapping[int, ResolvedType] = field(default_factory=dict)


def _has_types(announced: Relation, current: Relation | None) -> bool:
    """Say whether a relation tells the types of all announced columns."""
    known = () if current is None else current.columns
    typed = {(c.name, c.type_oid, c.typmod) for c in known if c.type is not None}
    return all((c.name, c.type_oid, c.typmod) in typed for c in announced.columns)


def _as_announced(relation: Relation) -> Relation:
    """Reduce a relation to what its message says."""
    columns = tuple(Column(c.name, c.type_oid, c.typmod, c.is_key) for c in relation.columns)
    return replace(relation, columns=columns, primary_key=())


def _attnums(relation: Relation) -> list[int | None]:
    return [column.attnum for column in relation.columns]


def _read_changers(conn: Connection, relation_id: int) -> dict[int, int]:
    """Read by attnum, dropped columns included, which transaction last changed each column."""
    with conn.cursor() as cursor:
        cursor.execute(
            "select attnum, xmin::text::bigint from pg_attribute where attrelid = %s::oid "
            "and attnum > 0",
            (relation_id,),
        )
        return dict(cursor.fetchall())


def _precedes(xid: int, other: int) -> bool:
    """Compare transaction ids, which go round."""
    return (xid - other) % 2**32 >= 2**31


def _complete_type(column: Column, types: Mapping[int, ResolvedType]) -> Column:
    resolved = types.get(column.type_oid)
    return column if resolved is None else resolved.complete(column)


def _match_attnums(announced: Sequence[Column], known: Mapping[str, Column]) -> list[int | None]:
    """Find each announced column's attnum by its name, refusing what contradicts the columns'
    order.

    Columns come in order of attnum. A name that now stands behind a later column was dropped and
    added again, and is another column than the announced one. Between two certain neighbours the
    numbers are forced when there are as many of them as columns: a renamed or dropped one keeps its
        number so.
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
