"""`raw/definitions`: the definition of each captured table at the newest look at the catalog.

Each look that finds a difference replaces the whole content in one commit. Earlier looks are in
earlier versions of the Delta table until maintenance deletes their files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from deltalake import DeltaTable

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.protocol.relation import Column, Relation, ReplicaIdentity
from pgcdc_assets.protocol.table_definition import (
    Membership,
    Partition,
    RowVersion,
    TableDefinition,
)
from pgcdc_assets.raw.delta.compaction import removals
from pgcdc_assets.raw.delta.newest_versions import NewestVersions
from pgcdc_assets.raw.delta.scan import data_files, scan
from pgcdc_assets.raw.delta.table import RawTable
from pgcdc_assets.table_name import TableName


@dataclass(frozen=True)
class SeenDefinition:
    """The definition of one table.

    Attributes:
        table: the declared table.
        lsn: the end of the WAL after the look that first saw the definition.
        text: the definition as JSON, which only a changed catalog makes worth parsing.
    """

    table: TableName
    lsn: Lsn
    text: str

    @cached_property
    def definition(self) -> TableDefinition:
        """The definition."""
        return _definition(json.loads(self.text))

    @cached_property
    def comments(self) -> dict[int, str]:
        """The comments by attnum, 0 for the table."""
        return _comments(json.loads(self.text))


@dataclass(frozen=True)
class CatalogLook:
    """The newest look of an epoch.

    Attributes:
        digest: digest of the catalog's rows; None before the first look of the epoch.
        tables: the watched tables by OID.
        is_past: a later epoch has looked. A look of this epoch would replace that one, whose next
            look would then find no change.
    """

    digest: str | None = None
    tables: Mapping[int, SeenDefinition] = field(default_factory=dict)
    loaded: DeltaTable | None = field(default=None, repr=False, compare=False)
    is_past: bool = False

    def comments(self, relation_id: int) -> dict[int, str] | None:
        """Return the comments of a table by attnum, 0 for the table; None for another table."""
        seen = self.tables.get(relation_id)
        return None if seen is None else seen.comments

    def moved_partitions(self, later: Mapping[int, TableDefinition]) -> set[int]:
        """Return the OIDs of the partitions that were attached or detached before a later look.

        Args:
            later: the definitions of the later look, by OID.
        """
        return {
            oid
            for root, seen in self.tables.items()
            if root in later
            for oid in seen.definition.moved_partitions(later[root])
        }


_LOOKS = NewestVersions[dict[int, CatalogLook]](16)


@dataclass(frozen=True)
class DefinitionStore:
    """The definitions of one capture's tables.

    Attributes:
        table: the Delta table.
        capture: the capture's name.
    """

    table: RawTable
    capture: str

    def read(self, epoch: int) -> CatalogLook:
        """Return the newest look of an epoch; an empty look before the first."""
        loaded = self.table.load()
        if loaded is None:
            return CatalogLook()
        looks = self._looks(loaded)
        is_past = any(other > epoch for other in looks)
        return replace(looks.get(epoch, CatalogLook()), loaded=loaded, is_past=is_past)

    def newest(self, epoch: int) -> CatalogLook:
        """Return the newest look like `read`, for readers only: it has no loaded version."""

        def read() -> tuple[int, dict[int, CatalogLook]] | None:
            loaded = self.table.load()
            return None if loaded is None else (loaded.version(), self._looks(loaded))

        looks = _LOOKS.get(self.table.lake, self.table.uri, self.capture, read) or {}
        return looks.get(epoch, CatalogLook())

    def replace(
        self, epoch: int, base: CatalogLook, digest: str, tables: Mapping[int, SeenDefinition]
    ) -> bool:
        """Replace the look that `read` has returned.

        An empty look after an empty look is not stored. An empty look has no row with a digest, so
        each later look would be stored.

        Returns:
            False if another process has stored a look after `base` was read. Nothing is stored.

        Raises:
            TransientError: the lake cannot be written.
        """
        if not base.tables and not tables:
            return True
        loaded = base.loaded
        if loaded is None:
            loaded = self.table.load_or_create()
            if data_files(loaded):
                return False
        rows = [
            {
                "epoch": epoch,
                "lsn": int(seen.lsn),
                "schema": seen.table.schema,
                "table": seen.table.table,
                "relation_id": relation_id,
                "digest": digest,
                "definition": seen.text,
            }
            for relation_id, seen in sorted(tables.items())
        ]
        return self.table.commit_rows(
            loaded,
            rows,
            removed=removals(data_files(loaded)),
            app_id=f"pgcdc:{self.capture}:definitions",
            app_version=int(loaded.version()) + 1,
            record={"definitions": len(rows)},
        )

    def _looks(self, loaded: DeltaTable) -> dict[int, CatalogLook]:
        """Read the looks of a version by epoch."""
        digests: dict[int, str] = {}
        tables: dict[int, dict[int, SeenDefinition]] = {}
        for batch in scan(self.table, data_files(loaded), self.table.schema.names):
            for row in batch.to_pylist():
                epoch, name = row["epoch"], TableName(row["schema"], row["table"])
                digests[epoch] = row["digest"]
                seen = SeenDefinition(name, Lsn(row["lsn"]), row["definition"])
                tables.setdefault(epoch, {})[row["relation_id"]] = seen
        return {epoch: CatalogLook(digest, tables[epoch]) for epoch, digest in digests.items()}


def definition_text(definition: TableDefinition) -> str:
    """Return a definition as JSON. Equal definitions have equal texts."""
    row = asdict(definition) | {"attnums": sorted(definition.attnums)}
    return json.dumps(row, ensure_ascii=False, sort_keys=True)


def _comments(row: dict[str, Any]) -> dict[int, str]:
    # Looks of an earlier release have no comments.
    return {int(k): text for k, text in row.get("comments", {}).items()}


def _definition(row: dict[str, Any]) -> TableDefinition:
    relation = row["relation"]
    return TableDefinition(
        relation=Relation(
            **relation
            | {
                "replica_identity": ReplicaIdentity(relation["replica_identity"]),
                "columns": tuple(Column(**column) for column in relation["columns"]),
                "primary_key": tuple(relation["primary_key"]),
                "unsent_identity": tuple(relation.get("unsent_identity", ())),
            }
        ),
        is_published=row["is_published"],
        membership=Membership(
            publication=row["membership"]["publication"],
            tables=tuple(row["membership"]["tables"]),
            schemas=tuple(row["membership"]["schemas"]),
            classes=tuple(row["membership"]["classes"]),
            inherits=tuple(row["membership"]["inherits"]),
            is_missing=row["membership"].get("is_missing", False),
        ),
        attnums=frozenset(row["attnums"]),
        column_versions={int(k): RowVersion(**v) for k, v in row["column_versions"].items()},
        # An earlier release did not look at the defaults.
        default_versions={int(k): v for k, v in row.get("default_versions", {}).items()},
        class_version=RowVersion(**row["class_version"]),
        type_version=row["type_version"],
        relfilenode=row["relfilenode"],
        toast=row.get("toast"),
        owner=row.get("owner", 0),
        partitions={int(k): Partition(**v) for k, v in row["partitions"].items()},
        # An earlier release did not look at the types.
        type_texts=row.get("type_texts"),
        comments=_comments(row),
    )
