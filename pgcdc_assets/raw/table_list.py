"""`raw/table_list`: the tables of a publication that a capture follows (`tables: all`).

The list is the contract between the processes that load definitions and the processes that see the
source: the lag sensor and `pgcdc sync` write the list, and each load of definitions reads the list.
A load therefore needs no connection to the source.

Each change replaces the whole content in one commit.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from deltalake import DeltaTable

from pgcdc_assets.raw.delta.compaction import removals
from pgcdc_assets.raw.delta.scan import data_files, scan
from pgcdc_assets.raw.delta.table import RawTable
from pgcdc_assets.table_name import TableName


class ListedState(enum.StrEnum):
    """The state of a listed table in a capture.

    FOLLOWED: the publication sends the table, and the table has assets.
    LEFT: a captured table that the publication does not send any more; its assets stay.
    REFUSED: the publication sends the table, but the table cannot be captured; it has no assets.
    """

    FOLLOWED = "followed"
    LEFT = "left"
    REFUSED = "refused"


@dataclass(frozen=True)
class ListedTable:
    """One table of the list.

    Attributes:
        name: the declared name, which a table keeps when it is renamed at the source.
        relation_id: OID of the table.
        state: what the capture does with the table.
        reason: a sentence about a table that left or is refused; else empty.
    """

    name: TableName
    relation_id: int
    state: ListedState = ListedState.FOLLOWED
    reason: str = ""


@dataclass(frozen=True)
class TableList:
    """The list at the newest look.

    Attributes:
        digest: digest of what the list was made of; None for an empty list.
        tables: the tables, ordered by name.
        loaded: the version of the Delta table that was read.
    """

    digest: str | None = None
    tables: tuple[ListedTable, ...] = ()
    loaded: DeltaTable | None = field(default=None, repr=False, compare=False)

    @property
    def declared(self) -> list[TableName]:
        """The names of the tables with assets."""
        return [table.name for table in self.tables if table.state is not ListedState.REFUSED]

    def of_state(self, state: ListedState) -> list[ListedTable]:
        """Return the tables of one state."""
        return [table for table in self.tables if table.state is state]


@dataclass(frozen=True)
class PublishedRelation:
    """A table that the publication sends now.

    Attributes:
        name: schema and name.
        relation_id: OID.
        refusal: a sentence that says why the table cannot be captured; None for a good table.
    """

    name: TableName
    relation_id: int
    refusal: str | None = None


@dataclass(frozen=True)
class TableListStore:
    """The list of one capture.

    Attributes:
        table: the Delta table.
        capture: the capture's name.
    """

    table: RawTable
    capture: str

    def read(self) -> TableList:
        """Return the list; an empty list before the first look.

        Raises:
            ConfigurationError: the lake cannot be read.
        """
        loaded = self.table.newest()
        if loaded is None:
            return TableList()
        digest: str | None = None
        tables = []
        for batch in scan(self.table, data_files(loaded), self.table.schema.names):
            for row in batch.to_pylist():
                digest = row["digest"]
                tables.append(
                    ListedTable(
                        TableName(row["schema"], row["table"]),
                        row["relation_id"],
                        ListedState(row["state"]),
                        row["reason"],
                    )
                )
        ordered = sorted(tables, key=lambda table: table.name)
        return TableList(digest, tuple(ordered), loaded)

    def replace(self, base: TableList, digest: str, tables: Sequence[ListedTable]) -> bool:
        """Replace the list that `read` has returned.

        An empty list after an empty list is not stored. An empty list has no row with a digest, so
        each later look at the catalog would store the list again.

        Returns:
            False if another process has stored a list after `base` was read. Nothing is stored.

        Raises:
            TransientError: the lake cannot be written.
        """
        if not base.tables and not tables:
            return True
        loaded = base.loaded
        if loaded is None:
            loaded = self.table.load_or_create()
            if loaded.version() > 0:
                return False
        rows = [
            {
                "schema": table.name.schema,
                "table": table.name.table,
                "relation_id": table.relation_id,
                "state": table.state.value,
                "reason": table.reason,
                "digest": digest,
            }
            for table in tables
        ]
        return self.table.commit_rows(
            loaded,
            rows,
            removed=removals(data_files(loaded)),
            app_id=f"pgcdc:{self.capture}:table_list",
            app_version=int(loaded.version()) + 1,
            record={"tables": len(rows)},
        )


def plan_table_list(
    before: Iterable[ListedTable],
    published: Iterable[PublishedRelation],
    *,
    selects: Callable[[TableName], bool],
    publication: str,
    captured: Collection[TableName],
    relation_ids: Mapping[TableName, int],
) -> list[ListedTable]:
    """Return the next list.

    A table that was captured stays in the list until the patterns exclude it. A table that left
    before it was captured leaves the list, so tables that exist for a moment leave nothing behind.

    Args:
        before: the tables of the list before.
        published: the tables that the publication sends now.
        selects: function of a declared name that returns whether the capture keeps the table.
        publication: the publication's name.
        captured: declared names of the tables with a complete snapshot in any epoch.
        relation_ids: OIDs of the declared tables with a snapshot.
    """
    current = list(published)
    taken = {relation.name for relation in current}
    known = {table.name: table for table in before if selects(table.name)}
    # A renamed table is followed by its OID, until another table has its declared name.
    renamed = {
        oid: name for name, oid in relation_ids.items() if name in known and name not in taken
    }
    listed: dict[TableName, ListedTable] = {}
    for relation in current:
        name = relation.name
        if name not in known:
            name = renamed.get(relation.relation_id, name)
        if not selects(name):
            continue
        if relation.refusal is not None and name not in captured:
            refused = ListedState.REFUSED
            listed[name] = ListedTable(name, relation.relation_id, refused, relation.refusal)
        else:
            listed[name] = ListedTable(name, relation.relation_id)
    for name in known.keys() - listed.keys():
        if name in captured:
            reason = f"Publication {publication} does not send the table any more."
            listed[name] = ListedTable(name, known[name].relation_id, ListedState.LEFT, reason)
    return [listed[name] for name in sorted(listed)]
