"""`pgcdc check`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pgcdc_assets.capture.slot_owner import check_owner, check_restore, read_row, sync_remedy
from pgcdc_assets.capture.source_checks import check_server_timeline
from pgcdc_assets.cli.output import complain
from pgcdc_assets.errors import (
    ConfigurationError,
    DefiniteError,
    MergeConflict,
    PgcdcError,
    TransientError,
)
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.orchestration.checks.source_tables import find_declared_moves, read_relation_ids
from pgcdc_assets.orchestration.project import home
from pgcdc_assets.orchestration.resources import PostgresResource
from pgcdc_assets.orchestration.table_list import look_at_tables
from pgcdc_assets.postgres.catalog.relations import published_relations
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.postgres.preflight.heartbeat import examine_heartbeat
from pgcdc_assets.postgres.preflight.options import examine_options, examine_subscribed_tables
from pgcdc_assets.postgres.preflight.run import Finding, run_preflight
from pgcdc_assets.postgres.preflight.slot_primary import examine_slot_primary
from pgcdc_assets.postgres.preflight.snapshot_standby import examine_snapshot_standby
from pgcdc_assets.postgres.slots.health import SlotProblem, slot_health
from pgcdc_assets.postgres.slots.status import read_server_identity, read_slot_status
from pgcdc_assets.postgres.wal.timelines import server_timeline
from pgcdc_assets.protocol.relation import Relation
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.table_list import ListedState
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import LONGEST_SLOT, CdcCapture, CdcTable, check_slot_name
from pgcdc_assets.settings.policies import SnapshotPolicy
from pgcdc_assets.spark.catalog import check_catalog
from pgcdc_assets.table_name import TableName
from pgcdc_assets.tables.columns import check_names, system_columns_of
from pgcdc_assets.tables.tables_ahead import find_tables_ahead

if TYPE_CHECKING:
    from pgcdc_assets.orchestration.project.code_location import LoadedCapture
    from pgcdc_assets.orchestration.project.defs_tables import DefsTables
    from pgcdc_assets.postgres.connection import Connection

# Characters that a slot's name cannot have.
_WITHOUT_SLOT = re.compile("[^a-z0-9_]")

_MARKS = {"ok": "ok     ", "warning": "warning", "error": "ERROR  "}


def run(options: argparse.Namespace) -> int:
    """Check the named publication, or the publications of all declared captures.

    An error of a capture does not stop the next capture. The highest exit status is returned.

    Raises:
        ConfigurationError: a finding is an error, and there is one capture.
    """
    if options.publication is not None:
        name = options.name or ""
        settings = ConnectionSettings(home.conninfo(), name=name)
        # The name of a publication may be as long as the longest name of a slot.
        default = f"pgcdc_{name or _WITHOUT_SLOT.sub('_', options.publication)}"[:LONGEST_SLOT]
        slot = options.slot or default
        check_slot_name(slot)
        report(settings, options.publication, run_preflight(settings, options.publication, slot))
        return 0
    if options.slot is not None:
        raise ConfigurationError(
            reason="--slot belongs to --publication. A declared capture has its own slot: the "
            "setting `slot`."
        )
    from pgcdc_assets.orchestration.project.code_location import load_location
    from pgcdc_assets.orchestration.project.defs_tables import find_defs_tables

    captures = load_location(options.module).select(options.name)
    failures: list[PgcdcError] = []
    for loaded in captures:
        declared = find_defs_tables(home.defs_folders(), loaded.capture.name)
        try:
            _check_loaded(loaded, declared)
        except PgcdcError as error:
            if len(captures) == 1:
                raise
            complain(f"{loaded.capture.name}: {error}")
            failures.append(error)
    return max((error.exit_status for error in failures), default=0)


def _check_loaded(loaded: LoadedCapture, declared: DefsTables | None) -> None:
    settings = loaded.postgres.settings()
    zone = loaded.lake.zone(loaded.capture.name)
    findings = examine_capture(settings, loaded.capture, zone)
    for error in find_declared_moves(settings, zone, loaded.capture, "check"):
        findings.append(Finding("moved", "error", str(error), table=error.relation))
    findings += examine_snapshot_source(loaded.postgres, loaded.capture.snapshot)
    findings += examine_session_catalog(loaded)
    report(settings, loaded.capture.publication, _with_places(findings, declared))
    loaded.lake.lake().check_writable()


def examine_capture(
    settings: ConnectionSettings, capture: CdcCapture, zone: RawZone
) -> list[Finding]:
    """Check that the server meets the needs of a declared capture, and fits the raw zone."""
    epoch = zone.epochs.latest()
    capture, apart = _followed_tables(settings, capture, zone)
    keys = {table.name: table.key for table in capture.tables if table.key}
    known = read_relation_ids(zone, capture)
    findings = run_preflight(
        settings,
        capture.publication,
        capture.slot,
        capture.table_names,
        keys=keys,
        is_slot_ours=capture.adopt_slot or epoch is not None,
        is_slot_known=epoch is not None,
        two_phase=capture.stream.two_phase,
        relation_ids=known,
        may_be_empty=capture.selection is not None,
    )
    if epoch is not None:
        try:
            with server_timeline(settings) as server:
                check_server_timeline(zone, server)
        except DefiniteError as error:
            findings.append(Finding("timeline", "error", str(error)))
        except (ConfigurationError, TransientError):
            # The findings contain the reason for a missing replication connection.
            pass
    # The findings contain a missing publication, whose tables are then not known.
    has_publication = not any(f.code == "publication" and f.severity == "error" for f in findings)
    with query_connection(settings, "check") as conn:
        relations = published_relations(conn, capture.publication) if has_publication else []
        known_codes = {finding.code for finding in findings}
        findings += [
            finding
            for finding in _check_source(conn, capture, zone)
            # Another timeline is the reason why the WAL ends early.
            if finding.code != "timeline" or finding.code not in known_codes
        ]
        findings += examine_options(conn, capture.slot_policy, capture.stream)
        if has_publication:
            findings += examine_subscribed_tables(conn, capture.publication, capture.stream)
        findings += examine_slot_primary(conn, settings, capture.slot)
        findings += examine_source_writes(conn, capture, zone)
    folders = examine_folders(zone.lake, capture.table_names)
    return [*findings, *apart, *examine_columns(relations, capture.tables, known), *folders]


def _check_source(conn: Connection, capture: CdcCapture, zone: RawZone) -> Iterator[Finding]:
    """Check that the raw zone was filled from this slot and cluster, and that the slot continues.

    A capture may run: it lands a window that the server has written, and then confirms the window.
    So the raw zone is read before the slot for the end of the WAL, and after it for the slot.
    """
    before = _captured_through(zone)
    server, status = read_server_identity(conn), read_slot_status(conn, capture.slot)
    try:
        zone.epochs.check_source(
            slot=capture.slot, database=server.database, system_identifier=server.system_identifier
        )
    except DefiniteError as error:
        yield Finding("source", "error", str(error))
        return
    through = _captured_through(zone)
    if through is None:
        return
    if (ahead := find_tables_ahead(zone, capture).error) is not None:
        yield Finding("restored", "error", str(ahead))
    for code, problems, end in (
        ("timeline", (SlotProblem.SERVER_BEHIND,), before),
        ("slot", (SlotProblem.MISSING, SlotProblem.ADVANCED), through),
    ):
        health = slot_health(status, end)
        if health.problem in problems:
            yield Finding(code, "error", str(health.error(capture.slot, zone.uri, capture.name)))


def _captured_through(zone: RawZone) -> Lsn | None:
    epoch = zone.epochs.latest()
    return None if epoch is None else zone.captured_on(epoch)[0]


def examine_source_writes(
    conn: Connection, capture: CdcCapture, zone: RawZone
) -> Iterator[Finding]:
    """Check the heartbeats that the capture writes, and what an earlier heartbeat shows."""
    policy = capture.heartbeat
    if policy is None:
        return
    status = read_slot_status(conn, capture.slot)
    in_recovery = read_server_identity(conn).in_recovery
    yield from examine_heartbeat(conn, policy, capture.publication, in_recovery=in_recovery)
    row, epoch = read_row(conn, policy, status), zone.epochs.latest()
    try:
        if status is not None and not capture.adopt_slot:
            check_owner(row, status, zone, sync_remedy(zone.name))
        if epoch is not None:
            check_restore(row, zone, epoch.epoch)
    except DefiniteError as error:
        yield Finding("owner", "error", str(error))


def examine_snapshot_source(postgres: PostgresResource, policy: SnapshotPolicy) -> list[Finding]:
    """Check the standby that copies read from, if the settings name one."""
    try:
        standby = postgres.standby_settings(policy)
    except ConfigurationError as error:
        return [Finding("snapshot_standby", "error", str(error))]
    return [] if standby is None else examine_snapshot_standby(postgres.settings(), standby)


def examine_session_catalog(loaded: LoadedCapture) -> Iterator[Finding]:
    """Check that the Spark session of the merges has the catalog of the settings, if any."""
    policy = loaded.capture.catalog
    if policy is None:
        return
    try:
        check_catalog(loaded.spark.session(loaded.lake.lake()), policy)
    except (ConfigurationError, TransientError) as error:
        yield Finding("catalog", "error", str(error))


def _followed_tables(
    settings: ConnectionSettings, capture: CdcCapture, zone: RawZone
) -> tuple[CdcCapture, list[Finding]]:
    """Return a capture with the tables that its publication sends now, and a finding per other."""
    if capture.selection is None:
        return capture, []
    try:
        with query_connection(settings, "check") as conn:
            listed = look_at_tables(conn, zone, capture, zone.table_list.read())
    except ConfigurationError:
        # The pre-flight reports a missing publication.
        return capture, []
    apart = [
        Finding(
            "table",
            "warning",
            f"Table {table.name} is {table.state}. {table.reason}",
            table=str(table.name),
        )
        for table in listed
        if table.state is not ListedState.FOLLOWED
    ]
    there = {table.name for table in listed if table.state is ListedState.FOLLOWED}
    known = {str(table.name) for table in listed}
    for own in capture.own_settings or ():
        if own.qualified_name not in known:
            what = f"Publication {capture.publication} does not send table {own.qualified_name}"
            sentence = f"{what}, which has its own settings."
            apart.append(Finding("table", "warning", sentence, table=own.qualified_name))
    return capture.with_listed_tables(there), apart


def examine_folders(lake: Lake, names: Iterable[TableName]) -> Iterator[Finding]:
    """Report tables whose folders differ only in case, on a file system that ignores case."""
    if not lake.ignores_case:
        return
    seen: dict[tuple[str, str], TableName] = {}
    for name in names:
        other = seen.setdefault((name.schema.casefold(), name.table.casefold()), name)
        if other != name:
            yield Finding(
                "folder",
                "error",
                f"The names of tables {other} and {name} differ only in case, and the file system "
                f"of the lake {lake.uri} ignores case: both tables would have one folder.",
                "Remove one of the two from the settings, or move the lake to a file system that "
                "distinguishes case.",
                str(name),
            )


def examine_columns(
    relations: Iterable[Relation],
    tables: Iterable[CdcTable],
    relation_ids: Mapping[TableName, int] | None = None,
) -> Iterator[Finding]:
    """Report column names that Delta cannot distinguish, and declared types of missing columns.

    Args:
        relation_ids: OIDs of captured tables by declared name, to find renamed tables.
    """
    by_name = {relation.name: relation for relation in relations}
    by_id = {relation.relation_id: relation for relation in by_name.values()}
    for table in sorted(tables, key=lambda table: table.name):
        relation = by_name.get(table.name) or by_id.get((relation_ids or {}).get(table.name, 0))
        if relation is None:
            continue
        try:
            for system in system_columns_of(table):
                check_names(relation, system)
        except MergeConflict as error:
            yield Finding("columns", "error", str(error), table=table.qualified_name)
        missing = sorted(set(table.types) - {column.name for column in relation.columns})
        if missing:
            yield Finding(
                "columns",
                "warning",
                f"The setting `types` of table {table.qualified_name} names "
                f"{', '.join(missing)}, which the publication does not send.",
                "Correct `types` of this table in the capture's settings.",
                table.qualified_name,
            )


def _with_places(findings: Iterable[Finding], declared: DefsTables | None) -> list[Finding]:
    """Prefix findings about a declared table or its key with file and line."""
    return [
        finding
        if (place := _declared_at(finding, declared)) is None
        else replace(finding, message=f"{place}: {finding.message}")
        for finding in findings
    ]


def _declared_at(finding: Finding, declared: DefsTables | None) -> str | None:
    is_declared = finding.severity == "error" and finding.code in ("table", "key")
    if declared is None or finding.table is None or not is_declared:
        return None
    return declared.place(TableName.parse(finding.table), finding.code)


def report(settings: ConnectionSettings, publication: str, findings: Sequence[Finding]) -> None:
    """Print findings with their remedies.

    Raises:
        ConfigurationError: a finding is an error.
    """
    print(f"Publication {publication}, {settings.describe()}")
    for finding in findings:
        print(f"  {_MARKS[finding.severity]}  {finding.message}")
        if finding.remedy:
            print(f"           remedy: {finding.remedy}")
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        what = "thing is" if len(errors) == 1 else "things are"
        raise ConfigurationError(
            reason=f"{len(errors)} {what} wrong or missing for publication {publication}: "
            f"{', '.join(dict.fromkeys(_place(finding) for finding in errors))}. See the remedies "
            "above."
        )


def _place(finding: Finding) -> str:
    return finding.code if finding.table is None else f"{finding.code} of {finding.table}"
