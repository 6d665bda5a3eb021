"""The definition of a captured table in the source's catalog, at one look.

A row of the catalog has a version: the id of the transaction that wrote it (`xmin`). A definition
keeps these versions, so that a change and its reversal between two looks is noticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pgcdc_assets.protocol.relation import Relation

CatalogRow = Mapping[str, Any]

# A longer comment is cut: each version of a Delta log has all comments.
COMMENT_LENGTH = 4000


def is_version(part: str) -> bool:
    """Return whether a part of `TableDefinition.type_texts` only shows that a type was altered."""
    return part.endswith(" version")


@dataclass(frozen=True, slots=True)
class Membership:
    """The catalog rows that determine whether and how a publication sends a table.

    Attributes:
        publication: the row of pg_publication with its version, and OID and version of each of its
            rows of pg_publication_namespace; None without the publication.
        tables: the rows of pg_publication_rel for the table and its ancestors. `columns` are the
            names of the column list, `prqual` is a digest of the row filter.
        schemas: the rows of pg_publication_namespace for the schemas of the table and its
            ancestors.
        classes: OID, schema, kind and persistence of the table and its ancestors.
        inherits: the rows of pg_inherits that lead to the ancestors, with their versions.
        is_missing: there was no publication of this name, and the other attributes are those of the
            last look that found the publication.
    """

    publication: CatalogRow | None
    tables: tuple[CatalogRow, ...]
    schemas: tuple[CatalogRow, ...]
    classes: tuple[Any, ...]
    inherits: tuple[CatalogRow, ...]
    is_missing: bool = False

    def column_list(self, relation_id: int) -> frozenset[str] | None:
        """Return the column list of a table that is sent under its own name; None without a list.

        Lists of its ancestors do not count (get_rel_sync_entry() in
        src/backend/replication/pgoutput/pgoutput.c).
        """
        if self.publication is None or self.publication["puballtables"] or self.schemas:
            return None
        own = (row.get("columns") for row in self.tables if int(row["prrelid"]) == relation_id)
        names = next(own, None)
        return None if names is None else frozenset(names)


@dataclass(frozen=True, slots=True)
class RowVersion:
    """The version of a catalog row.

    Attributes:
        xmin: id of the transaction that wrote the row.
        cmin: number of the command within this transaction; None on a standby, because the replay
            of WAL does not write the number (heap_xlog_insert() in src/backend/access/heap).
    """

    xmin: int
    cmin: int | None


@dataclass(frozen=True, slots=True)
class Partition:
    """A direct or indirect partition of a published partitioned table.

    Attributes:
        name: schema and table, for sentences.
        xmin: version of the row of pg_inherits, which ATTACH PARTITION writes.
        is_new_table: the table was created as a partition, so its first row came later.
        relfilenode: `pg_class.relfilenode`; 0 for a partitioned table.
        generated: versions of the rows of pg_attribute of stored generated columns; None without
            such a column, and in a look of an earlier release.
        toast: OID of the TOAST table; 0 without one, None in a look of an earlier release.
        tablespace: OID of the tablespace; 0 for that of the database, None likewise.
        written_by: `xmin` of the row of pg_class of the TOAST table; without one, of the partition.
        is_truncated: the file may come from a TRUNCATE.
    """

    name: str
    xmin: int
    is_new_table: bool
    relfilenode: int
    generated: str | None = None
    toast: int | None = None
    tablespace: int | None = None
    written_by: int = 0
    is_truncated: bool = False


@dataclass(frozen=True, slots=True)
class TableDefinition:
    """A table's definition in the catalog.

    Attributes:
        relation: the relation with the columns that the publication sends.
        is_published: the publication sends changes under the table's own name.
        membership: why and how the publication sends the table.
        attnums: attnums of all columns of the table, sent or not.
        column_versions: version of the row of pg_attribute by attnum, of the sent columns.
        default_versions: `xmin` of the row of pg_attrdef by attnum, of the columns with a default.
        class_version: version of the row of pg_class.
        type_version: `xmin` of the row of pg_type of the table's row type, which changes when the
            table is renamed, moved or gets another owner.
        relfilenode: `pg_class.relfilenode`, which each rewrite of the table changes; 0 for a
            partitioned table.
        toast: OID of the TOAST table; 0 without one, None in a look of an earlier release.
        owner: OID of the owner; 0 if unknown.
        partitions: the partitions by OID.
        type_texts: by OID of an enum or composite type of the sent columns, what the texts of
            stored values depend on: the type's `name`, and the label and its version by OID of a
            row of pg_enum, or the `attributes` of a composite type and the number of those that it
            ever had. None in a look of an earlier release, and without versions in a later one.
        comments: the comments of the columns by attnum, cut to `COMMENT_LENGTH`; 0 is the table.
    """

    relation: Relation
    is_published: bool
    membership: Membership
    attnums: frozenset[int]
    column_versions: Mapping[int, RowVersion]
    default_versions: Mapping[int, int]
    class_version: RowVersion
    type_version: int
    relfilenode: int
    toast: int | None
    owner: int
    partitions: Mapping[int, Partition]
    type_texts: Mapping[str, Mapping[str, str]] | None
    comments: Mapping[int, str]

    def is_rewritten_since(self, earlier: TableDefinition) -> bool:
        """Return whether the table, or a partition that both definitions have, has a new file."""
        common = self.partitions.keys() & earlier.partitions.keys()
        return self.relfilenode != earlier.relfilenode or any(
            self.partitions[oid].relfilenode != earlier.partitions[oid].relfilenode
            for oid in common
        )

    def moved_partitions(self, later: TableDefinition) -> set[int]:
        """Return the OIDs of the partitions that were attached or detached before a later look."""
        before = {(oid, partition.xmin) for oid, partition in self.partitions.items()}
        after = {(oid, partition.xmin) for oid, partition in later.partitions.items()}
        return {oid for oid, _ in before ^ after}
