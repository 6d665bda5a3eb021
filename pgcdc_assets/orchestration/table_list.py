"""The tables of a capture that follows its publication (`tables: all`).

The lag sensor and `pgcdc sync` compare the catalog with the list in the lake, and store a new list
(`refresh_table_list`). Each load of definitions reads the list (`declare_listed_tables`) and opens
no connection to the source. While the source is down, the newest stored list applies.

The process of a run loads the definitions again, perhaps after a change of the list. Dagster stores
the reconstruction metadata of the first load with the run. Each process of the run reads the names
from this metadata, so all processes have the same tables.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from dagster._core.definitions.definitions_load_context import (
    DefinitionsLoadContext,
    DefinitionsLoadType,
)

from pgcdc_assets.errors import MergeConflict, PgcdcError, TransientError
from pgcdc_assets.orchestration.resources import LakeResource, PostgresResource, open_resources
from pgcdc_assets.postgres.catalog.table_definitions import read_catalog_digest
from pgcdc_assets.postgres.preflight.capturable_tables import (
    CapturableTable,
    read_capturable_tables,
    read_role_digest,
)
from pgcdc_assets.raw.table_list import (
    ListedTable,
    PublishedRelation,
    TableList,
    plan_table_list,
)
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture
from pgcdc_assets.table_name import TableName
from pgcdc_assets.tables.columns import check_names, system_columns_of

if TYPE_CHECKING:
    from pgcdc_assets.postgres.connection import Connection

# The comparison is repeated if the catalog or the stored list changes at the same time.
_ATTEMPTS = 5

_refreshes_at_load: ContextVar[bool] = ContextVar("pgcdc_refreshes_at_load", default=False)


@contextmanager
def refresh_at_load() -> Iterator[None]:
    """Refresh the list at each load in the block, for commands that use the source anyway."""
    token = _refreshes_at_load.set(True)
    try:
        yield
    finally:
        _refreshes_at_load.reset(token)


def declare_listed_tables(
    capture: CdcCapture, postgres: PostgresResource, lake: LakeResource
) -> tuple[CdcCapture, dict[str, str]]:
    """Return the capture with its listed tables, and the reconstruction metadata of the load.

    Raises:
        ConfigurationError: the lake cannot be read.
    """
    key = f"pgcdc/tables/{capture.name}"
    context = DefinitionsLoadContext.get()
    is_reconstruction = context.load_type is DefinitionsLoadType.RECONSTRUCTION
    if is_reconstruction and key in context.reconstruction_metadata:
        text = str(context.reconstruction_metadata[key])
    else:
        text = json.dumps(_read_names(capture, postgres, lake), ensure_ascii=False)
    context.add_to_pending_reconstruction_metadata(key, text)
    names = [TableName(*name) for name in json.loads(text)]
    return capture.with_listed_tables(names), {key: text}


def _read_names(
    capture: CdcCapture, postgres: PostgresResource, lake: LakeResource
) -> list[TableName]:
    refreshes = _refreshes_at_load.get()
    # A process that only loads definitions may not have the secret of the source.
    used = {"lake": lake, "postgres": postgres} if refreshes else {"lake": lake}
    with open_resources(used) as resources:
        zone = resources.lake.zone(capture.name)
        if refreshes:
            try:
                with resources.postgres.query_connection("sync") as conn:
                    return refresh_table_list(conn, zone, capture).declared
            except PgcdcError:
                # The command itself reports the error when it uses the source.
                pass
        declared: list[TableName] = zone.table_list.read().declared
        return declared


def refresh_table_list(conn: Connection, zone: RawZone, capture: CdcCapture) -> TableList:
    """Compare the catalog with the list, store a new list, and return it.

    Without a change, the comparison sends two catalog queries to the source.

    Raises:
        ConfigurationError: the publication does not exist.
        TransientError: the server or the lake is not available now.
    """
    for _ in range(_ATTEMPTS):
        base = zone.table_list.read()
        digest = _digest(conn, capture, base)
        if digest == base.digest:
            return base
        tables = look_at_tables(conn, zone, capture, base)
        if _digest(conn, capture, base) != digest:
            continue
        if zone.table_list.replace(base, digest, tables):
            return TableList(digest, tuple(tables))
    raise TransientError(reason="The catalog changed during each attempt to read it. Run it again.")


def look_at_tables(
    conn: Connection, zone: RawZone, capture: CdcCapture, base: TableList
) -> list[ListedTable]:
    """Return the list according to the catalog, and store nothing.

    Args:
        base: the stored list.

    Raises:
        ConfigurationError: the publication does not exist.
    """
    keys = {table.name: table.key for table in capture.own_settings or () if table.key}
    capturable = read_capturable_tables(conn, capture.publication, keys)
    assert capture.selection is not None
    return plan_table_list(
        base.tables,
        [_published(capture, table) for table in capturable],
        selects=capture.selection.selects,
        publication=capture.publication,
        captured={snapshot.name for snapshot in zone.snapshots.complete_snapshots()},
        relation_ids=zone.followed_ids(),
    )


def _published(capture: CdcCapture, table: CapturableTable) -> PublishedRelation:
    relation, refusal = table.relation, table.refusal
    (declared,) = capture.with_listed_tables([relation.name]).tables or (None,)
    if refusal is None and declared is not None:
        try:
            for system in system_columns_of(declared):
                check_names(relation, system)
        except MergeConflict as error:
            refusal = str(error)
    return PublishedRelation(relation.name, relation.relation_id, refusal)


def _digest(conn: Connection, capture: CdcCapture, base: TableList) -> str:
    known = [table.relation_id for table in base.tables]
    catalog = read_catalog_digest(conn, capture.publication, known)
    rest = repr(
        (read_role_digest(conn), capture.publication, capture.selection, capture.own_settings)
    )
    return f"{catalog}:{hashlib.sha256(rest.encode()).hexdigest()[:16]}"
