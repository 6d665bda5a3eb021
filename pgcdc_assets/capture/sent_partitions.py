"""The partitions whose rows a stream has sent under the name of a partitioned table.

pgoutput announces the root right before the partition (`maybe_send_schema` in Postgres's
src/backend/replication/pgoutput/pgoutput.c), and again after each ATTACH and DETACH. The catalog
keeps no trace of a partition that was attached and detached between two looks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.protocol.relation import Relation
from pgcdc_assets.protocol.table_definition import TableDefinition
from pgcdc_assets.raw.relations.schema_events import SchemaChange, SchemaEvent


@dataclass(frozen=True)
class GonePartitions:
    """Partitions of one root that are gone.

    Attributes:
        lsn: commit LSN of the newest announcement.
        detail: one sentence.
    """

    lsn: Lsn
    detail: str


@dataclass
class SentPartitions:
    """The relations that a stream has announced, each with the relation announced before it.

    Attributes:
        sent: the newest announcement of each relation and the OID before it in its transaction: the
            commit LSN and the relation. Only those behind a partitioned table are partitions.
    """

    sent: dict[tuple[int, int], tuple[Lsn, Relation]] = field(default_factory=dict)
    _before: tuple[int, Lsn] | None = None

    def note(self, relation: Relation, commit_lsn: Lsn, is_for_row: bool) -> None:
        """Note an announced relation.

        Args:
            is_for_row: the announcement is of the transaction with this commit LSN, and right
                before a row. TRUNCATE announces a partitioned table without a partition.
        """
        if not is_for_row:
            self._before = None
            return
        if self._before is not None and self._before[1] == commit_lsn:
            root = self._before[0]
            if root != relation.relation_id:
                self.sent[root, relation.relation_id] = (commit_lsn, relation)
        self._before = (relation.relation_id, commit_lsn)

    def without(
        self,
        before: Mapping[int, TableDefinition],
        now: Mapping[int, TableDefinition],
        recorded: Iterable[SchemaEvent],
    ) -> dict[int, GonePartitions]:
        """Return by OID of the root the partitions that two looks lack.

        Args:
            before: the definitions of the look before, by OID.
            now: the definitions of the newest look.
            recorded: the events of the epoch. A later event of the root's partitions that needs a
                snapshot covers an announcement.
        """
        covered: dict[int, Lsn] = {}
        for event in recorded:
            if event.change is SchemaChange.PARTITION_DETACHED and event.needs_snapshot:
                root = event.relation_id
                covered[root] = max(event.lsn, covered.get(root, event.lsn))
        gone: dict[int, list[tuple[Lsn, str]]] = {}
        for (root, oid), (lsn, relation) in self.sent.items():
            definition = now.get(root)
            # A partitioned table has no file.
            if definition is None or definition.relfilenode or not definition.is_published:
                continue
            earlier = before[root].partitions if root in before else {}
            is_known = oid in definition.partitions or oid in earlier
            if not is_known and lsn > covered.get(root, Lsn(0)):
                gone.setdefault(root, []).append((lsn, relation.qualified_name))
        return {
            root: GonePartitions(
                max(lsn for lsn, _ in found),
                "Partitions were attached and detached or dropped again: "
                f"{', '.join(sorted({name for _, name in found}))}.",
            )
            for root, found in gone.items()
        }
