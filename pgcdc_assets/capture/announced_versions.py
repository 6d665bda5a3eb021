"""The relation versions that a stream announces in a window, each with the version before it.

A table that was altered back has a known version again. Nothing is new about the version, but the
table has changed: the look before, or the announcement before, shows another version.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.protocol.relation import Relation
from pgcdc_assets.raw.relations.definitions import CatalogLook, SeenDefinition
from pgcdc_assets.raw.relations.schema_changes import SchemaChangeFound
from pgcdc_assets.raw.relations.schema_events import CATALOG, SchemaChange, SchemaEvent

# The changes between two relation versions.
_OF_VERSIONS = frozenset(
    {
        SchemaChange.COLUMN_ADDED,
        SchemaChange.COLUMN_DROPPED,
        SchemaChange.COLUMN_RENAMED,
        SchemaChange.TYPE_WIDENED,
        SchemaChange.TYPE_CHANGED,
        SchemaChange.KEY_CHANGED,
        SchemaChange.IDENTITY_CHANGED,
        SchemaChange.TABLE_RENAMED,
    }
)


@dataclass(frozen=True)
class RelationChange:
    """A relation version that the stream has announced first or again, or that is not certain.

    Attributes:
        relation: the version.
        before: the version before it; None for a new OID; the same version if it is known, and the
            version before it is not.
        lsn: commit LSN of the announcing transaction.
        doubt: why other columns of the table may be meant; empty if this is certain.
    """

    relation: Relation
    before: Relation | None
    lsn: Lsn
    doubt: str

    @property
    def is_known(self) -> bool:
        """Whether the version is known, and the version before it is not."""
        return self.before is self.relation


@dataclass
class AnnouncedVersions:
    """The announcements of one window, in order, without repetitions."""

    _found: list[RelationChange] = field(default_factory=list, repr=False)
    _newest: dict[int, Relation] = field(default_factory=dict, repr=False)

    def note(self, announced: RelationChange) -> None:
        """Note an announced version."""
        oid = announced.relation.relation_id
        is_repeated = announced.is_known and self._newest.get(oid) == announced.relation
        if announced.doubt or not is_repeated:
            self._found.append(announced)
        self._newest[oid] = announced.relation

    def changes(self, base: CatalogLook) -> list[RelationChange]:
        """Return the announcements that may change a table.

        A known version without doubt changes the announcement before it, or the look before. If
        the look is later than the announcement, its events tell (`find_shown_later`).
        """
        changes: list[RelationChange] = []
        newest: dict[int, Relation] = {}
        for one in self._found:
            oid = one.relation.relation_id
            seen = base.tables.get(oid)
            before = newest.get(oid) or _earlier_relation(seen, one.lsn)
            newest[oid] = one.relation
            if one.doubt or not one.is_known:
                changes.append(one)
            elif before is not None:
                if not before.describes(one.relation):
                    changes.append(replace(one, before=before))
            elif seen is not None and seen.lsn > one.lsn:
                changes.append(one)
        return changes


def find_shown_later(recorded: Iterable[SchemaEvent], lsn: Lsn) -> list[SchemaChangeFound]:
    """Find the changes that led to a known version, by the events of a look after it.

    The newest look shows the version too. If all later events are of one look, the look before
    that one was before the announcement and had another version: the change is in between. If
    there are several such looks, the table may have been altered and altered back since.

    Args:
        recorded: the events of the table.
        lsn: commit LSN of the announcing transaction.
    """
    later = [event for event in recorded if event.lsn > lsn and event.change in _OF_VERSIONS]
    if len({event.lsn for event in later}) != 1:
        return []
    return [
        SchemaChangeFound(event.change, event.columns, event.detail, event.needs_snapshot)
        for event in later
        if event.found_by == CATALOG
    ]


def _earlier_relation(seen: SeenDefinition | None, lsn: Lsn) -> Relation | None:
    """Return the relation of a look before an LSN; None of a table that was not sent then."""
    if seen is None or seen.lsn > lsn or not seen.definition.is_published:
        return None
    return seen.definition.relation
