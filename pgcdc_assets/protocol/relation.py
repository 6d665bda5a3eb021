"""The schema of a published table at one point of the stream.

pgoutput's Relation message has names, type OIDs and typmods only (53.9 Logical Replication Message
Formats). Capture reads the rest from the catalog when the message arrives: attribute numbers, base
types of domains, element types of arrays, the primary key. A merge therefore needs no Postgres.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace

from pgcdc_assets.table_name import TableName


class ReplicaIdentity(enum.StrEnum):
    """`pg_class.relreplident`: what updates and deletes tell about the old row."""

    DEFAULT = "d"
    NOTHING = "n"
    FULL = "f"
    INDEX = "i"

    @property
    def sql(self) -> str:
        """The identity as ALTER TABLE names it."""
        return "USING INDEX" if self is ReplicaIdentity.INDEX else self.name


@dataclass(frozen=True, slots=True)
class Column:
    """One published column.

    Attributes:
        name: the column's name.
        type_oid: `pg_attribute.atttypid`, from the Relation message.
        typmod: `pg_attribute.atttypmod`; -1 for a type without modifier.
        is_key: part of the replica identity (bit 0 of the message's column flags).
        attnum: `pg_attribute.attnum`; None if the catalog no longer has the column.
        type: `format_type(type_oid, null)`, for display; None if the catalog no longer has the
            type.
        kind: `pg_type.typtype` of the base type, or of the element's base type for an array
            (b, c, e, r, m).
        base_type: `pg_type.typname` of the type below all domains, schema-qualified outside
            pg_catalog (`int4`, `numeric`, `_text`, `shop.order_status`).
        base_typmod: typmod of the base type: the column's typmod, or the typmod of a domain.
        element_type: type of an array's element below all domains, written like `base_type`; None
            for other types.
        element_typmod: typmod of an array's element; -1 for other types.
        missing: `pg_attribute.attmissingval` as text, the value of the rows that are older than
            the column; None without such a value.
        has_default: `pg_attribute.atthasdef`: a default or a generation expression; None if
            unknown, like the next three. A difference in one of the four makes no new version of
            the table, because the tuples are read alike.
        not_null: `pg_attribute.attnotnull`.
        generated: `pg_attribute.attgenerated`; empty for an ordinary column.
        identity: `pg_attribute.attidentity`; empty for an ordinary column.
    """

    name: str
    type_oid: int
    typmod: int = -1
    is_key: bool = False
    attnum: int | None = None
    type: str | None = None
    kind: str = "b"
    base_type: str | None = None
    base_typmod: int = -1
    element_type: str | None = None
    element_typmod: int = -1
    missing: str | None = None
    has_default: bool | None = field(default=None, compare=False)
    not_null: bool | None = field(default=None, compare=False)
    generated: str | None = field(default=None, compare=False)
    identity: str | None = field(default=None, compare=False)

    def has_type_of(self, other: Column) -> bool:
        """Return whether the columns have the same type with the same modifier."""
        return (self.type_oid, self.typmod) == (other.type_oid, other.typmod)


@dataclass(frozen=True, slots=True)
class Relation:
    """One version of a published table.

    Attributes:
        relation_id: `pg_class.oid`.
        columns: the published columns in tuple order.
        primary_key: names of the primary key's columns in key order; empty without a primary key.
        attribute_count: `pg_class.relnatts` at the time of the catalog query, the highest attnum
            ever assigned; None if unknown.
        is_partitioned: a partitioned table, whose partitions may have other replica identities. It
            is not stored in `raw/relations`.
        unsent_identity: columns of the replica identity's index that the publication does not send,
            such as a generated column before Postgres 18. The rest of the identity is no key. Not
            stored in `raw/relations` either.
    """

    relation_id: int
    schema: str
    table: str
    replica_identity: ReplicaIdentity
    columns: tuple[Column, ...]
    primary_key: tuple[str, ...] = ()
    attribute_count: int | None = field(default=None, compare=False)
    is_partitioned: bool = field(default=False, compare=False)
    unsent_identity: tuple[str, ...] = field(default=(), compare=False)

    @property
    def name(self) -> TableName:
        """Schema and table."""
        return TableName(self.schema, self.table)

    def as_announced(self) -> Relation:
        """Return the relation reduced to the fields of its Relation message."""
        columns = tuple(Column(c.name, c.type_oid, c.typmod, c.is_key) for c in self.columns)
        return replace(self, columns=columns, primary_key=())

    @property
    def qualified_name(self) -> str:
        """The name in sentences and reports, such as `shop.orders`."""
        return str(self.name)

    @property
    def has_full_identity(self) -> bool:
        """Whether updates and deletes bring the whole old row."""
        return self.replica_identity is ReplicaIdentity.FULL

    @property
    def row_key(self) -> tuple[str, ...]:
        """Names of the columns that identify a row; empty for a table without a key.

        A primary key that is sent identifies a row if the old tuples of updates and deletes contain
        all its columns, or if there are none: with the replica identity NOTHING, the server refuses
        updates and deletes. Otherwise the columns of the replica identity's index identify a row.
        """
        identity = tuple(column.name for column in self.columns if column.is_key)
        has_no_old_tuples = self.replica_identity is ReplicaIdentity.NOTHING
        has_old_key = self.has_full_identity or set(self.primary_key) <= set(identity)
        is_sent = set(self.primary_key) <= {column.name for column in self.columns}
        if self.primary_key and is_sent and (has_no_old_tuples or has_old_key):
            return self.primary_key
        return () if self.has_full_identity or self.unsent_identity else identity

    @property
    def highest_attnum(self) -> int:
        """The highest attnum ever assigned; if unknown, the highest one among the columns."""
        if self.attribute_count is not None:
            return self.attribute_count
        return max((column.attnum or 0 for column in self.columns), default=0)

    def match_columns(self, newer: Relation) -> dict[int, int]:
        """Match the columns with those of a newer version, by attnum, else by name.

        Returns:
            Positions in this version by positions in the newer version.
        """
        by_attnum = {c.attnum: i for i, c in enumerate(self.columns) if c.attnum is not None}
        by_name = {c.name: i for i, c in enumerate(self.columns)}
        found = {}
        for index, column in enumerate(newer.columns):
            position = by_attnum.get(column.attnum) if column.attnum is not None else None
            if position is None:
                position = by_name.get(column.name)
                if position is not None and column.attnum is not None:
                    known = self.columns[position].attnum
                    # The same name with another attnum is another column.
                    position = position if known is None else None
            if position is not None:
                found[index] = position
        return found

    def with_missing_of(self, other: Relation) -> Relation:
        """Return the relation with the values of `missing` that another version has.

        A rewrite of the table clears `attmissingval`. Until then it is as ADD COLUMN has set it.
        """
        known = {c.attnum: c for c in other.columns if c.missing is not None}
        if not known:
            return self
        columns = []
        for column in self.columns:
            theirs = known.get(column.attnum) if column.missing is None else None
            # Another type may print the value in another way.
            if theirs is not None and column.has_type_of(theirs):
                columns.append(replace(column, missing=theirs.missing))
            else:
                columns.append(column)
        return replace(self, columns=tuple(columns))

    def describes(self, other: Relation) -> bool:
        """Return whether `other` is the same version of the table.

        A difference in `missing` does not count if `other` has no value: a rewrite of the table
        (VACUUM FULL, ALTER TABLE) clears `attmissingval`.
        """
        if len(self.columns) != len(other.columns):
            return False
        columns = tuple(
            replace(theirs, missing=ours.missing) if theirs.missing is None else theirs
            for ours, theirs in zip(self.columns, other.columns, strict=True)
        )
        return self == replace(other, columns=columns)
