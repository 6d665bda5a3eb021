"""`pgcdc init`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pgcdc_assets.cli.check import examine_columns, report
from pgcdc_assets.errors import ConfigurationError, local_write_error
from pgcdc_assets.local import drafted
from pgcdc_assets.orchestration.project import home
from pgcdc_assets.orchestration.project.defs_file import check_defs_folders
from pgcdc_assets.orchestration.project.defs_tables import DefsTables, component_yaml, replace_text
from pgcdc_assets.postgres.catalog.relations import published_relations
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.postgres.preflight.finding import Finding, Severity, raise_errors
from pgcdc_assets.postgres.preflight.options import examine_options
from pgcdc_assets.postgres.preflight.run import run_preflight
from pgcdc_assets.protocol.relation import Relation
from pgcdc_assets.settings import (
    CdcCapture,
    CdcTable,
    check_capture_name,
    check_slot_name,
)
from pgcdc_assets.settings.policies import SlotPolicy, StreamPolicy
from pgcdc_assets.settings.selection import TableSelection

# The beginnings of an expression, a statement and a comment.
_TEMPLATE = ("{{", "{%", "{#")


def run(options: argparse.Namespace) -> int:
    """Check the source, then write the capture's `defs.yaml`, or add tables to the file.

    Raises:
        ConfigurationError: the source is not ready, or the file exists.
    """
    # The name becomes the name of a folder.
    check_capture_name(options.name)
    if options.slot:
        check_slot_name(options.slot)
    return _update(options) if options.update else _write(options)


def _write(options: argparse.Namespace) -> int:
    if options.publication is None:
        raise ConfigurationError(reason="--publication is missing; only --update does not need it")
    path, *others = _places(options)
    there = [place for place in (path, *others) if place.is_file()]
    if there and not (options.force and there == [path]):
        remedy = ", --force replaces it" if there == [path] else ""
        raise ConfigurationError(
            reason=f"{there[0]} exists already: --update adds the missing tables{remedy}"
        )
    slot = options.slot or f"pgcdc_{options.name}"
    if options.failover:
        _check_failover(ConnectionSettings(home.conninfo(), name=options.name))
    if options.all_tables:
        selection = TableSelection()
        capture = CdcCapture(options.name, options.publication, (), slot=slot, selection=selection)
        _report_publication(capture)
        tables: Sequence[CdcTable] | None = None
    else:
        tables = _published(home.conninfo(), options.name, options.publication, slot)
        capture = CdcCapture(options.name, options.publication, tables, slot=slot)
    text = component_yaml(
        *(capture.name, capture.publication, tables), slot=capture.slot, failover=options.failover
    )
    _write_file(path, text)
    count = "tables: all" if tables is None else f"{len(tables)} tables"
    print(f"Wrote {path} with {count}. Next: {_next_step(path, options.name)}")
    return 0


def _next_step(path: Path, name: str) -> str:
    folder = path.parent.parent
    if folder.resolve() in [loaded.resolve() for loaded in home.defs_folders()]:
        return f"pgcdc sync --name {name}"
    return (
        f"load {folder} in a code location MODULE of your own, then pgcdc sync -m MODULE "
        f"--name {name}"
    )


def _write_file(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            replace_text(path, text)
            return
        # A process that is killed must not leave a part of the file.
        with drafted(path) as draft:
            draft.write_text(text, "utf-8")
    except OSError as error:
        remedy = "name a folder that this user can write with --defs"
        raise local_write_error(path, error, remedy) from error


def _check_failover(settings: ConnectionSettings) -> None:
    """Report what a slot with `failover` needs.

    Raises:
        ConfigurationError: the server has no such slots.
    """
    with query_connection(settings, "check") as conn:
        findings = list(examine_options(conn, SlotPolicy(failover=True), StreamPolicy()))
    raise_errors(findings)
    for finding in findings:
        print(f"{finding.severity}: {finding}")


def _report_publication(capture: CdcCapture) -> None:
    """Check a source whose tables are followed. Errors of single tables are warnings.

    Raises:
        ConfigurationError: the server, the slot or the publication is not ready.
    """
    settings = ConnectionSettings(home.conninfo(), name=capture.name)
    findings = run_preflight(settings, capture.publication, capture.slot, may_be_empty=True)
    report(
        settings,
        capture.publication,
        [f if f.table is None else replace(f, severity=_at_most_warning(f)) for f in findings],
    )


def _at_most_warning(finding: Finding) -> Severity:
    return "warning" if finding.severity == "error" else finding.severity


def _update(options: argparse.Namespace) -> int:
    """Add the publication's new tables to the file, and print other differences."""
    if options.force or options.slot is not None or options.all_tables or options.failover:
        raise ConfigurationError(
            reason="--update cannot be combined with --force, --slot, --all-tables or --failover"
        )
    path = _find(options)
    check_defs_folders([path.parent])
    listed = DefsTables.read(path, options.name)
    publication = listed.attributes["publication"]
    if "{{" in publication:
        if options.publication is None:
            raise ConfigurationError(
                reason=f"{path}: `publication` is a template, which --update does not read: name "
                "the publication with --publication"
            )
        publication = options.publication
    if options.publication not in (None, publication):
        raise ConfigurationError(
            reason=f"{path} captures publication {publication}, not {options.publication}: "
            "declare another capture for it"
        )
    if any(_is_template(entry["name"]) for entry in listed.attributes["tables"]):
        raise ConfigurationError(
            reason=f"{path}: the name of a table is a template, which --update does not read, so a "
            "table could be listed twice: add new tables by hand"
        )
    slot = listed.attributes.get("slot") or f"pgcdc_{options.name}"
    conninfo = home.conninfo(listed.attributes.get("dsn_env", home.DSN_VARIABLE))
    tables = _published(conninfo, options.name, publication, slot)
    published = {table.name: table for table in tables}
    added = [table for name, table in published.items() if name not in listed.names]
    listed.add(added)
    for table in added:
        key = ", ".join(table.key or ()) or "none"
        print(f"Added {table.qualified_name}, key: {key}.")
    for name in listed.names:
        if name not in published:
            print(
                f"{name} is no longer in publication {publication}. Its entry is kept: remove the "
                "entry to end the capture of the table. Its tables in the lake are kept too."
            )
            continue
        declared, found = listed.key(name), list(published[name].key or ())
        if declared and declared != found:
            print(
                f"{name} has key ({', '.join(declared)}) in the file and "
                f"({', '.join(found) or 'none'}) in the source. The file is not changed."
            )
    what = f"added {len(added)} tables to {path}" if added else f"{path} has all tables already"
    print(f"{options.name}: {what}.")
    return 0


def _find(options: argparse.Namespace) -> Path:
    places = _places(options)
    for path in places:
        if path.is_file():
            return path
    raise ConfigurationError(
        reason=f"There is no {' or '.join(map(str, places))} to update: write it by pgcdc init "
        "without --update"
    )


def _places(options: argparse.Namespace) -> list[Path]:
    """List the files that may declare the capture; a new file is the first one."""
    given: Path | None = options.defs
    folders = home.defs_folders() if given is None else [given]
    name: str = options.name
    return [folder / name / "defs.yaml" for folder in folders]


def _published(conninfo: str, name: str, publication: str, slot: str) -> tuple[CdcTable, ...]:
    """Check the source, and describe the tables of the publication that can be merged."""
    settings = ConnectionSettings(conninfo, name=name)
    report(settings, publication, run_preflight(settings, publication, slot))
    with query_connection(settings, "check") as conn:
        relations = published_relations(conn, publication)
    tables = tuple(map(_table, relations))
    refused = {finding.table: finding.message for finding in examine_columns(relations, tables)}
    for table in tables:
        if not any(map(_is_template, (*table.name, *(table.key or ())))):
            continue
        refused[table.qualified_name] = (
            f"Table {table.qualified_name} has a template in its name or key, which Dagster would "
            "replace in a YAML file. Declare the table in Python, or write the file with "
            "--all-tables."
        )
    for message in refused.values():
        print(f"Omitted: {message}")
    return tuple(table for table in tables if table.qualified_name not in refused)


def _is_template(text: str) -> bool:
    """Return whether Jinja would read a text as more than a text, such as the value of a secret."""
    return any(mark in text for mark in _TEMPLATE)


def _table(relation: Relation) -> CdcTable:
    # Use the merge's rule: a key that old tuples do not contain would stop every merge.
    return CdcTable(relation.schema, relation.table, (1,), relation.row_key or None)
