"""Keys and descriptions of the assets; users override one method.

The key of an asset is its path in the lake.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Any

import dagster as dg

from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets.table_name import encode_name
from pgcdc_assets.tables.messages import describe_columns

LAYER_TAG = "pgcdc/layer"


class Layer(Enum):
    """The kinds of assets of a capture."""

    SOURCE = "source"
    RAW = "raw"
    SNAPSHOT = "snapshot"
    MESSAGES = "messages"
    SCD1 = "scd1"
    SCD2 = "scd2"


@dataclass(frozen=True)
class AssetData:
    """The asset that a specification describes.

    Attributes:
        layer: the kind of the asset.
        capture: the capture that the asset belongs to.
        table: the table. None for the assets of the raw zone and of logical messages.
    """

    layer: Layer
    capture: CdcCapture
    table: CdcTable | None = None

    @property
    def key(self) -> dg.AssetKey:
        """The default asset key; its names are encoded like the folders of the lake."""
        if self.table is None:
            return dg.AssetKey([self.capture.name, self.layer.value])
        names = encode_name(self.table.schema), encode_name(self.table.table)
        return dg.AssetKey([self.capture.name, self.layer.value, *names])


class PgcdcTranslator:
    """The keys and descriptions of the assets of a capture.

    Override `get_asset_spec` to change keys, groups, owners, tags, descriptions or automation:

        class Ours(PgcdcTranslator):
            def get_asset_spec(self, data):
                return super().get_asset_spec(data).replace_attributes(owners=["team:data"])

    The package then sets dependencies and partitions, with the keys that the method returned.
    """

    def get_asset_spec(self, data: AssetData) -> dg.AssetSpec:
        """Return the specification of an asset, without dependencies and partitions."""
        describe = {
            Layer.SOURCE: _source,
            Layer.RAW: _raw,
            Layer.SNAPSHOT: _snapshot,
            Layer.MESSAGES: _messages,
            Layer.SCD1: _scd1,
            Layer.SCD2: _scd2,
        }[data.layer]
        description, kinds, metadata = describe(data)
        tags = {"pgcdc/capture": data.capture.name, LAYER_TAG: data.layer.value}
        return dg.AssetSpec(
            key=data.key,
            description=description,
            group_name=data.capture.name,
            kinds=kinds,
            tags=tags if data.table is None else {**tags, **_table_tags(data.table)},
            metadata=metadata,
        )


def _source(data: AssetData) -> tuple[str, set[str], dict[str, Any]]:
    table = _table(data)
    return (
        f"Table `{table.qualified_name}` in the source database, published by "
        f"`{data.capture.publication}`.",
        {"postgres", "table"},
        {"dagster/table_name": table.qualified_name},
    )


def _raw(data: AssetData) -> tuple[str, set[str], dict[str, Any]]:
    return (
        f"Every committed change of publication `{data.capture.publication}`, exactly once, in "
        "commit order. One partition is one window of WAL: `epoch-start-end`, the LSNs in "
        f"hexadecimal. Read by replication slot `{data.capture.slot}`.",
        {"postgres", "delta"},
        {
            "publication": data.capture.publication,
            "slot": data.capture.slot,
            "dagster/table_name": f"{data.capture.name}.raw.changes",
        },
    )


def _snapshot(data: AssetData) -> tuple[str, set[str], dict[str, Any]]:
    return (
        "Snapshots of the tables, each at one LSN. One partition is one table; materialise a "
        "partition to take a new snapshot of the table, which the next merge applies.",
        {"postgres", "delta"},
        {"dagster/table_name": f"{data.capture.name}.raw.snapshots"},
    )


def _messages(data: AssetData) -> tuple[str, set[str], dict[str, Any]]:
    prefixes = None if data.capture.messages is None else data.capture.messages.prefixes
    which = "every prefix" if prefixes is None else f"the prefixes {', '.join(prefixes)}"
    columns = [
        dg.TableColumn(name, kind, description) for name, kind, description in describe_columns()
    ]
    return (
        f"The captured logical messages of {which}, each exactly once. The append of a window "
        "also appends every earlier captured window above the watermark of the table.",
        {"delta"},
        {
            "dagster/table_name": f"{data.capture.name}.messages",
            "dagster/column_schema": dg.TableSchema(columns),
        },
    )


def _scd1(data: AssetData) -> tuple[str, set[str], dict[str, Any]]:
    table = _table(data)
    return (
        f"The current rows of `{table.qualified_name}`: {_rows(table)}. The merge of a window "
        "folds every captured window from the watermark of the table through this window.",
        {"pyspark", "delta"},
        _scd_metadata(data),
    )


def _rows(table: CdcTable) -> str:
    """Describe the rows of a current image, according to the settings."""
    if table.key is not None:
        return f"one row for each key ({', '.join(table.key)})"
    if table.without_key == "log":
        return "one row for each key or, if the table has no key, one for each change"
    return "one row for each row of the source, including equal rows of a table without a key"


def _scd2(data: AssetData) -> tuple[str, set[str], dict[str, Any]]:
    table = _table(data)
    metadata = _scd_metadata(data)
    if table.tracked is not None:
        metadata["tracked_columns"] = ", ".join(table.tracked)
    return (
        f"Every version of each row of `{table.qualified_name}` in commit order, with the change "
        "that began and the change that ended it. The merge of a window folds every captured "
        "window from the watermark of the table through this window.",
        {"pyspark", "delta"},
        metadata,
    )


def _scd_metadata(data: AssetData) -> dict[str, Any]:
    table = _table(data)
    name = f"{data.capture.name}.{data.layer.value}.{table.qualified_name}"
    metadata: dict[str, Any] = {"dagster/table_name": name}
    if table.key is not None:
        metadata["key_columns"] = ", ".join(table.key)
    return metadata


def _table(data: AssetData) -> CdcTable:
    if data.table is None:
        raise ValueError(f"{data.layer} needs a table")
    return data.table


def _table_tags(table: CdcTable) -> dict[str, str]:
    """Return tags to filter by; names that Dagster does not accept as tag values are omitted."""
    tags = {"pgcdc/schema": table.schema, "pgcdc/table": table.table}
    return {key: value for key, value in tags.items() if _TAG_VALUE.fullmatch(value)}


_TAG_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.\-]{0,61}[A-Za-z0-9])?")
