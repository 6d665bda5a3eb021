"""The history of each row, which triggers of the source record, and its comparison with SCD2.

The triggers are independent of the stream. `v` is the only column that random DDL does not change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from psycopg2 import sql
from psycopg2.extensions import cursor as Cursor

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.raw.delta.scan import scan_changes
from pgcdc_assets.tables.columns import VALID_FROM_LSN
from pgcdc_assets.tables.state import table_path

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pgcdc_assets.raw.zone import RawZone
    from pgcdc_assets.table_name import TableName
    from pgcdc_assets_tests.support.database import Database

AUDIT = """
create table audit (
    seq bigserial primary key, xid bigint, declared text, id int, part int, v text, is_there bool);
create function audit() returns trigger language plpgsql as $$
begin
    if tg_op <> 'INSERT' then
        insert into audit (xid, declared, id, part, is_there)
        select pg_current_xact_id()::text::bigint % 4294967296, tg_argv[0], old.id,
               (to_jsonb(old) ->> 'part')::int, false;
    end if;
    if tg_op <> 'DELETE' then
        insert into audit (xid, declared, id, part, v, is_there)
        select pg_current_xact_id()::text::bigint % 4294967296, tg_argv[0], new.id,
               (to_jsonb(new) ->> 'part')::int, md5(new.v), true;
    end if;
    return null;
end $$;
"""

_TRIGGER = """
create trigger audit after insert or update or delete on {0}
    for each row execute function audit({1});
insert into audit (xid, declared, id, part, v, is_there)
select 0, {1}, t.id, (to_jsonb(t) ->> 'part')::int, md5(t.v), true from {0} t
"""

# The key columns of a row, then the digest of its text.
Key = tuple[int, int | None]
Version = tuple[Key, Lsn, str | None]


@dataclass(frozen=True)
class HistoryDifference:
    """The missing versions of a table, and versions without a row change at the source."""

    missing: list[Version]
    invented: list[Version]


def audit_table(cursor: Cursor, table: sql.Identifier, declared: str) -> None:
    """Record the rows of a table and its later row changes."""
    cursor.execute(sql.SQL(_TRIGGER).format(table, sql.Literal(declared)))


def compare_history(
    spark: SparkSession, database: Database, zone: RawZone, table: TableName
) -> HistoryDifference:
    """Compare the versions of a table's SCD2 with the audit.

    The result of each transaction for a row is a version, if the text changed, except between a
    schema event that needs a snapshot and this snapshot.
    """
    found = _lake_versions(spark, zone, table)
    recorded, changed = _audited_versions(database, zone, table)
    snapshots = sorted(
        s.snapshot_lsn for s in zone.snapshots.complete_snapshots() if s.name == table
    )
    gaps = [(Lsn(0), snapshots[0])]
    for event in zone.schema_events.read():
        if event.table == table and event.needs_snapshot:
            healed = [lsn for lsn in snapshots if lsn >= event.lsn]
            gaps.append((event.lsn, healed[0] if healed else Lsn(2**63 - 1)))
    expected = {v for v in changed if not _is_within(v[1], gaps)}
    invented = {v for v in found - recorded if v[1] not in snapshots}
    return HistoryDifference(sorted(expected - found, key=str), sorted(invented, key=str))


def _is_within(lsn: Lsn, gaps: Iterable[tuple[Lsn, Lsn]]) -> bool:
    return any(start <= lsn < end for start, end in gaps)


def _lake_versions(spark: SparkSession, zone: RawZone, table: TableName) -> set[Version]:
    path = table_path(zone.lake, zone.name, table.schema, table.table, 2)
    rows = spark.read.format("delta").load(path)
    part = "part" if "part" in rows.columns else "cast(null as int)"
    selected = rows.selectExpr("id", f"{part} as part", "v", VALID_FROM_LSN)
    return {
        ((id_, part), Lsn(lsn), None if v is None else hashlib.md5(v.encode()).hexdigest())
        for id_, part, v, lsn in selected.collect()
    }


def _audited_versions(
    database: Database, zone: RawZone, table: TableName
) -> tuple[set[Version], set[Version]]:
    """Return all versions of the audit, and those of transactions that changed a row's text."""
    committed: dict[int, Lsn] = {}
    for batch in scan_changes(
        zone.changes.table, epoch=1, start=0, end=2**63 - 1, columns=("xid", "commit_lsn")
    ):
        pairs = zip(batch["xid"].to_pylist(), batch["commit_lsn"].to_pylist(), strict=True)
        committed |= {xid % 2**32: Lsn(lsn) for xid, lsn in pairs}
    recorded: set[Version] = set()
    changed: set[Version] = set()
    results: dict[tuple[Key, int], tuple[str | None, bool]] = {}
    for xid, id_, part, v, is_there in database.query(
        "select xid, id, part, v, is_there from audit where declared = %s order by seq",
        (table.table,),
    ):
        # A transaction that is not in the raw zone has changed rows of an unpublished table.
        results[(id_, part), xid] = (v, is_there)
        if is_there and xid in committed:
            recorded.add(((id_, part), committed[xid], v))
    newest: dict[Key, tuple[str | None, bool]] = {}
    for (key, xid), (v, is_there) in results.items():
        if is_there and xid in committed and newest.get(key) != (v, True):
            changed.add((key, committed[xid], v))
        newest[key] = (v, is_there)
    return recorded, changed
