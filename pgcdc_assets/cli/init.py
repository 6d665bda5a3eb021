"""`pgcdc init`."""

from __future__ import annotations

import argparse
from pathlib import Path

from pgcdc_assets.cli.check import report
from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.merge.shape import default_key
from pgcdc_assets.orchestration import defaults
from pgcdc_assets.orchestration.settings import CdcCapture, CdcTable, component_yaml
from pgcdc_assets.postgres.catalog import published_relations
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.postgres.preflight import run_preflight
from pgcdc_assets.protocol.relation import Relation


def run(options: argparse.Namespace) -> int:
    """Check the source, then write the capture's component instance.

    Raises:
        ConfigurationError: the source is not ready, or the file is there already.
    """
    folder: Path = options.defs or defaults.default_defs_folder()
    path = folder / options.name / "defs.yaml"
    if path.exists() and not options.force:
        raise ConfigurationError(
            reason=f"{path} exists already: edit it, or replace it with --force"
        )
    settings = ConnectionSettings(defaults.conninfo(), name=options.name)
    slot = options.slot or f"pgcdc_{options.name}"
    report(settings, options.publication, run_preflight(settings, options.publication, slot))
    with query_connection(settings, "check") as conn:
        relations = published_relations(conn, options.publication)
    tables = tuple(_table(relation) for relation in relations)
    capture = CdcCapture(options.name, options.publication, tables, slot=slot)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        component_yaml(capture.name, capture.publication, capture.tables, slot=capture.slot)
    )
    print(f"Wrote {path} with {len(tables)} tables. Next: pgcdc sync --name {options.name}")
    return 0


def _table(relation: Relation) -> CdcTable:
    # The merge's own rule: a key that updates and deletes do not bring would stop every merge.
    return CdcTable(relation.schema, relation.table, (1,), default_key(relation) or None)
