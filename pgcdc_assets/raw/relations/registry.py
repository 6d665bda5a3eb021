"""`raw/relations`: the schema of each relation version, which describes the tuples.

Version numbers begin with 1 per relation and epoch. A known schema keeps its version number, so a
window that is captured again after a crash has the same version numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pgcdc_assets.errors import RawZoneError, TransientError, renewal_command
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.protocol.relation import Column, Relation, ReplicaIdentity
from pgcdc_assets.raw.delta.newest_versions import NewestVersions
from pgcdc_assets.raw.delta.scan import data_files, scan
from pgcdc_assets.raw.delta.table import RawTable
from pgcdc_assets.table_name import TableName

_ATTEMPTS = 5

# Fields of a column that are lists of their own beside `columns`, because Delta adds no field to a
# struct of an early release.
_LATER_FIELDS = ("missing", "has_default", "not_null", "generated", "identity")


@dataclass(frozen=True)
class RelationVersion:
    """A relation's schema from an LSN on.

    Attributes:
        epoch: the epoch.
        version: the version number, from 1.
        lsn: first LSN with this version: a commit LSN, or the LSN of a snapshot.
        relation: the schema.
    """

    epoch: int
    version: int
    lsn: Lsn
    relation: Relation


_VERSIONS = NewestVersions[Mapping[tuple[int, int, int], RelationVersion]](16)


@dataclass
class RelationRegistry:
    """Registry of relation versions. New versions are in memory until `flush`.

    Attributes:
        table: the Delta table.
        capture: the capture's name.
    """

    table: RawTable
    capture: str
    _known: dict[tuple[int, int], list[RelationVersion]] | None = field(default=None, repr=False)
    _new: list[RelationVersion] = field(default_factory=list, repr=False)

    def versions(self, epoch: int) -> list[RelationVersion]:
        """Read the stored versions of an epoch, ordered by relation and version."""
        stored = self._read().values()
        found = [version for version in stored if version.epoch == epoch]
        return sorted(found, key=lambda v: (v.relation.relation_id, v.version))

    def registered(self, epoch: int, relation_id: int) -> list[tuple[Lsn, Relation]]:
        """Return the versions of a relation, oldest first, each with its first LSN.

        Versions before `flush` are included.
        """
        return [(each.lsn, each.relation) for each in self._versions_of(epoch, relation_id)]

    def count(self, epoch: int) -> int | None:
        """Return the number of versions of an epoch; None if none was looked up since `discard`."""
        known = self._known
        if known is None:
            return None
        return sum(len(versions) for (of_epoch, _), versions in known.items() if of_epoch == epoch)

    def version_before(self, epoch: int, relation_id: int, lsn: Lsn) -> Relation | None:
        """Return the newest version that was seen up to an LSN; None for an unknown relation.

        A snapshot registers its version before the changes below its LSN are captured.
        """
        known = self._versions_of(epoch, relation_id)
        seen = [version for version in known if version.lsn <= lsn]
        newest = max(seen or known, key=lambda v: (v.lsn, v.version), default=None)
        return None if newest is None else newest.relation

    def register(self, epoch: int, relation: Relation, lsn: Lsn) -> int:
        """Return the version number of a relation's schema, a new number for a new schema.

        Args:
            epoch: the epoch.
            relation: the schema.
            lsn: first LSN with this schema: a commit LSN, or the LSN of a snapshot.
        """
        known = self._versions_of(epoch, relation.relation_id)
        for version in known:
            if version.relation.describes(relation):
                return version.version
        number = known[-1].version if known else 0
        new = RelationVersion(epoch, number + 1, lsn, relation)
        known.append(new)
        self._new.append(new)
        return new.version

    def flush(self) -> None:
        """Store the new versions in one commit. Call `flush` before the commit of the rows.

        Raises:
            TransientError: another process used one of the version numbers at the same time.
        """
        for _ in range(_ATTEMPTS):
            if not self._new:
                return
            table = self.table.load_or_create()
            stored = self._read()
            for version in self._new:
                found = stored.get(_key(version))
                if found is not None and found.relation != version.relation:
                    raise self._clash(version)
            missing = [version for version in self._new if _key(version) not in stored]
            if not missing or self.table.commit_rows(
                table,
                [_row(version) for version in missing],
                app_id=f"pgcdc:{self.capture}:relations",
                app_version=len(stored) + len(missing),
                record={"relations": [v.relation.name.record_name for v in missing]},
            ):
                self._new = []
        if self._new:
            raise self._clash(self._new[0])

    def missing_error(self, table: str, version: int) -> RawZoneError:
        """Return the error of a version that rows use and that is not stored."""
        return RawZoneError(
            raw_zone=self.table.uri,
            reason=f"relation version {version} of {table} is not described. Restore the table "
            f"from a backup, or begin a new epoch with {renewal_command(self.capture)}.",
        )

    def discard(self) -> None:
        """Discard the versions in memory: those that are not stored, and those that are.

        Call `discard` after a failed landing, and before a window: since the last window of the
        process, another process may have stored versions.
        """
        self._known = None
        self._new = []

    def _versions_of(self, epoch: int, relation_id: int) -> list[RelationVersion]:
        """Return the known versions of a relation, in order. The first call reads the table."""
        if self._known is None:
            self._known = {}
            for key, version in sorted(self._read().items()):
                self._known.setdefault(key[:2], []).append(version)
        return self._known.setdefault((epoch, relation_id), [])

    def _clash(self, version: RelationVersion) -> TransientError:
        self.discard()
        return TransientError(
            reason=f"Another process registered {version.relation.qualified_name} in "
            f"{self.table.uri} at the same time. Nothing was landed; run it again."
        )

    def _read(self) -> Mapping[tuple[int, int, int], RelationVersion]:
        # For every scan: another process may have added versions.
        return _VERSIONS.get(self.table.lake, self.table.uri, self.capture, self._scan) or {}

    def _scan(self) -> tuple[int, Mapping[tuple[int, int, int], RelationVersion]] | None:
        loaded = self.table.load()
        if loaded is None:
            return None
        versions: dict[tuple[int, int, int], RelationVersion] = {}
        for batch in scan(self.table, data_files(loaded), self.table.schema.names):
            for row in batch.to_pylist():
                version = _version(row)
                key = _key(version)
                if versions.setdefault(key, version).relation != version.relation:
                    raise RawZoneError(
                        raw_zone=self.table.uri,
                        reason=f"version {version.version} of {version.relation.qualified_name} "
                        "has two different entries, so another program has written to the Delta "
                        "table. Restore the table from a backup, or delete the wrong entry with "
                        "epoch = {} AND relation_id = {} AND relation_version = {}.".format(*key),
                    )
        return loaded.version(), versions


def newest_ids_of(
    versions: Iterable[RelationVersion], tables: Iterable[TableName]
) -> dict[TableName, int]:
    """Return the OID by which each table was last seen; tables never seen are left out."""
    wanted = set(tables)
    newest: dict[TableName, RelationVersion] = {}
    for version in versions:
        name = version.relation.name
        if name in wanted and (name not in newest or version.lsn > newest[name].lsn):
            newest[name] = version
    return {name: version.relation.relation_id for name, version in newest.items()}


def _key(version: RelationVersion) -> tuple[int, int, int]:
    return version.epoch, version.relation.relation_id, version.version


def _row(version: RelationVersion) -> dict[str, Any]:
    relation = version.relation
    return {
        "epoch": version.epoch,
        "relation_id": relation.relation_id,
        "relation_version": version.version,
        "lsn": int(version.lsn),
        "schema": relation.schema,
        "table": relation.table,
        "replica_identity": relation.replica_identity.value,
        "columns": [asdict(column) for column in relation.columns],
        "primary_key": list(relation.primary_key),
        "attribute_count": relation.attribute_count,
        **{name: [getattr(c, name) for c in relation.columns] for name in _LATER_FIELDS},
    }


def _version(row: dict[str, Any]) -> RelationVersion:
    # Early releases wrote neither the later fields nor `attribute_count`.
    unknown: list[Any] = [None] * len(row["columns"])
    later: dict[str, list[Any]] = {name: row[name] or unknown for name in _LATER_FIELDS}
    relation = Relation(
        relation_id=row["relation_id"],
        schema=row["schema"],
        table=row["table"],
        replica_identity=ReplicaIdentity(row["replica_identity"]),
        columns=tuple(
            Column(**column, **{name: values[index] for name, values in later.items()})
            for index, column in enumerate(row["columns"])
        ),
        primary_key=tuple(row["primary_key"]),
        attribute_count=row["attribute_count"],
    )
    return RelationVersion(row["epoch"], row["relation_version"], Lsn(row["lsn"]), relation)
