"""What a relation looks like at one point of the stream.

pgoutput's Relation message gives names, type OIDs and typmods only; the rest (attribute numbers,
base types of domains, element types of arrays, the primary key) is resolved from the catalog when
the message is captured, so that merging needs no Postgres.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pgcdc_assets.table_name import TableName

_IDENTITIES = {"d": "DEFAULT", "n": "NOTHING", "f": "FULL", "i": "USING INDEX"}


@dataclass(frozen=True, slots=True)
class Column:
    """One published column.

    Attributes:
        name: the column's name.
        type_oid: `pg_attribute.atttypid`, as the Relation message says it.
        typmod: `pg_attribute.atttypmod`; -1 when the type has none.
        is_key: part of the replica identity (bit 0 of the message's column flags).
        attnum: `pg_attribute.attnum`; None when the catalog no longer has the column.
        type: `format_type(type_oid, null)`, for people; None when the catalog no longer has the
            type.
        kind: `pg_type.typtype` of the base type, or of the element's base type for an array
            (b, c, e, r, m).
        base_type: `pg_type.typname` of the type below all domains, schema-qualified outside
            pg_catalog (`int4`, `numeric`, `_text`, `shop.order_status`).
        base_typmod: the typmod that governs the base type, be it the column's or a domain's.
        element_type: for an array, the element's type below all domains, written like `base_type`;
            else None.
        element_typmod: for an array, the typmod that governs an element; else -1.
        missing: `pg_attribute.attmissingval`, the value of the rows that are older than the column,
            as Postgres prints it; None when there is none.
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


@dataclass(frozen=True, slots=True)
class Relation:
    """One version of a published table.

    Attributes:
        relation_id: `pg_class.oid`.
        replica_identity: `pg_class.relreplident`: d(efault), n(othing), f(ull) or i(ndex).
        columns: in tuple order.
        primary_key: names of the primary key's columns in key order; empty when there is none.
        attribute_count: `pg_class.relnatts`, the highest attnum that was ever given, when the
            catalog was asked; None where it is not known.
    """

    relation_id: int
    schema: str
    table: str
    replica_identity: str
    columns: tuple[Column, ...]
    primary_key: tuple[str, ...] = ()
    attribute_count: int | None = field(default=None, compare=False)

    @property
    def name(self) -> TableName:
        """Schema and table."""
        return TableName(self.schema, self.table)

    @property
    def qualified_name(self) -> str:
        """The name for messages."""
        return str(self.name)

    @property
    def row_key(self) -> tuple[str, ...]:
        """The columns that identify a row; empty where nothing does.

        They are the primary key, or the index of the replica identity. A primary key counts only
        where updates and deletes bring it.
        """
        identity = tuple(column.name for column in self.columns if column.is_key)
        if self.primary_key and (
            self.replica_identity == "f" or set(self.primary_key) <= set(identity)
        ):
            return self.primary_key
        return identity if self.replica_identity != "f" else ()

    @property
    def identity_name(self) -> str:
        """The replica identity as ALTER TABLE names it."""
        return _IDENTITIES.get(self.replica_identity, self.replica_identity)

    def describes(self, other: Relation) -> bool:
        """Say whether another relation is of this version.

        A table that is written anew forgets the values of rows that are older than a column.
        """
        if len(self.columns) != len(other.columns):
            return False
        columns = tuple(
            replace(theirs, missing=ours.missing) if theirs.missing is None else theirs
            for ours, theirs in zip(self.columns, other.columns, strict=True)
        )
        return self == replace(other, columns=columns)
