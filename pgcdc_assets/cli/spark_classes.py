"""`python -m pgcdc_assets.cli.spark_classes FILE`: an archive of the classes of a merge.

The process merges a table of a few rows, so that its JVM loads the classes of a merge. At its end,
the JVM writes the loaded classes to the file. `pgcdc spark prepare` starts the process.
"""

from __future__ import annotations

import datetime as dt
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa

from pgcdc_assets.lsn import Lsn, LsnWindow
from pgcdc_assets.merge import MergeReport, merge_tables
from pgcdc_assets.protocol.relation import Column, Relation, ReplicaIdentity
from pgcdc_assets.raw import schema
from pgcdc_assets.raw.epochs import Epoch
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.spark.class_archive import JAVA_OPTIONS, SILENT
from pgcdc_assets.spark.jars import with_known_jars
from pgcdc_assets.spark.session import spark_session
from pgcdc_assets.spark.settings import embedded_conf

_SECONDS_TO_WRITE = 120.0
_NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
_START = Lsn(0x1000)
_TARGETS = (
    CdcTable("public", "items", scd=(1, 2)),
    CdcTable("public", "items_kept", soft_deletes=True),
)


def main(draft: Path) -> None:
    """Load the classes, and write the archive to `draft`, whose folder is used for a lake."""
    known = with_known_jars(embedded_conf())
    options = f"{known[JAVA_OPTIONS]} -XX:ArchiveClassesAtExit={draft} {SILENT}"
    conf = {
        **known,
        JAVA_OPTIONS: options,
        "spark.sql.warehouse.dir": f"{draft.parent}/warehouse",
    }
    # The variable would determine the options of this JVM too.
    os.environ.pop("JDK_JAVA_OPTIONS", None)
    spark = spark_session("pgcdc classes", conf=conf)
    gateway: Any = spark.sparkContext._gateway
    zone = RawZone(Lake(f"{draft.parent}/lake"), "prepare")
    _describe(zone)
    for number in range(2):
        window = _land(zone, number)
        for report in merge_tables(spark, zone, list(_TARGETS), window):
            if not isinstance(report, MergeReport):
                raise report.error
    spark.stop()
    gateway.shutdown()
    # The JVM ends at the end of its standard input.
    gateway.proc.stdin.close()
    gateway.proc.wait(_SECONDS_TO_WRITE)


def _describe(zone: RawZone) -> None:
    """Record an epoch, and land a snapshot of each table."""
    zone.epochs.append(
        Epoch(
            epoch=1,
            start_lsn=_START,
            slot="prepare",
            publication="prepare",
            database="prepare",
            system_identifier="1",
            timeline=1,
            server_version=180000,
            created_at=_NOW,
        )
    )
    texts = pa.array([["1", "a"], ["2", "b"]], type=schema.CHANGES.field("new").type)
    batch = pa.RecordBatch.from_arrays([texts], names=["new"])
    for number, target in enumerate(_TARGETS, 1):
        relation = _relation(number, target.table)
        zone.relations.register(1, relation, _START)
        zone.relations.flush()
        zone.snapshots.land_snapshot(1, _START, relation, 1, [batch])


def _relation(relation_id: int, table: str) -> Relation:
    columns = tuple(
        Column(
            name=name,
            type_oid=oid,
            typmod=-1,
            base_type=base_type,
            base_typmod=-1,
            type=base_type,
            attnum=attnum,
            is_key=attnum == 1,
        )
        for attnum, (name, oid, base_type) in enumerate((("id", 23, "int4"), ("v", 25, "text")), 1)
    )
    return Relation(relation_id, "public", table, ReplicaIdentity("d"), columns, ("id",))


def _land(zone: RawZone, number: int) -> LsnWindow:
    """Land an insert, an update and a delete of each table as a window."""
    start = _START + 0x100 * number
    key = str(3 + number)
    changes = (
        ("I", None, None, [key, "c"]),
        ("U", None, None, ["1", f"z{number}"]),
        ("D", "K", [str(2 + number), None], None),
    )
    rows = [
        {
            "commit_lsn": start + 0x10 * relation_id,
            "ordinal": ordinal,
            "xid": 1,
            "commit_ts": _NOW,
            "op": op,
            "relation_id": relation_id,
            "relation_version": 1,
            "schema": target.schema,
            "table": target.table,
            "old_kind": old_kind,
            "old": old,
            "new": new,
        }
        for relation_id, target in enumerate(_TARGETS, 1)
        for ordinal, (op, old_kind, old, new) in enumerate(changes)
    ]
    window = LsnWindow.of(1, start, start + 0x100)
    fields = [field for field in schema.CHANGES if field.name not in ("epoch", "window")]
    zone.changes.land(window, pa.Table.from_pylist(rows, schema=pa.schema(fields)).to_batches())
    return window


if __name__ == "__main__":
    main(Path(sys.argv[1]))
