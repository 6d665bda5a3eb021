"""The Arrow schemas of the raw zone's tables. docs/reference/raw-zone.md explains the columns."""

from __future__ import annotations

import pyarrow as pa

from pgcdc_assets.protocol.arrow_batch import DECODED
from pgcdc_assets.protocol.tuples import TEXTS_TYPE

CHANGES = pa.schema(
    [
        pa.field("epoch", pa.int32(), nullable=False),
        pa.field("window", pa.string(), nullable=False),
        *DECODED,
    ]
)

COLUMN = pa.struct(
    [
        pa.field("name", pa.string(), nullable=False),
        pa.field("type_oid", pa.int64(), nullable=False),
        pa.field("typmod", pa.int32(), nullable=False),
        pa.field("is_key", pa.bool_(), nullable=False),
        pa.field("attnum", pa.int32()),
        pa.field("type", pa.string()),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("base_type", pa.string()),
        pa.field("base_typmod", pa.int32(), nullable=False),
        pa.field("element_type", pa.string()),
        pa.field("element_typmod", pa.int32(), nullable=False),
    ]
)

RELATIONS = pa.schema(
    [
        pa.field("epoch", pa.int32(), nullable=False),
        pa.field("relation_id", pa.int64(), nullable=False),
        pa.field("relation_version", pa.int32(), nullable=False),
        pa.field("lsn", pa.int64(), nullable=False),
        pa.field("schema", pa.string(), nullable=False),
        pa.field("table", pa.string(), nullable=False),
        pa.field("replica_identity", pa.string(), nullable=False),
        pa.field("columns", pa.list_(pa.field("element", COLUMN, nullable=False)), nullable=False),
        pa.field(
            "primary_key",
            pa.list_(pa.field("element", pa.string(), nullable=False)),
            nullable=False,
        ),
        pa.field("missing", pa.list_(pa.field("element", pa.string()))),
        pa.field("attribute_count", pa.int32()),
        pa.field("has_default", pa.list_(pa.field("element", pa.bool_()))),
        pa.field("not_null", pa.list_(pa.field("element", pa.bool_()))),
        pa.field("generated", pa.list_(pa.field("element", pa.string()))),
        pa.field("identity", pa.list_(pa.field("element", pa.string()))),
    ]
)

SNAPSHOTS = pa.schema(
    [
        pa.field("epoch", pa.int32(), nullable=False),
        pa.field("snapshot_lsn", pa.int64(), nullable=False),
        pa.field("schema", pa.string(), nullable=False),
        pa.field("table", pa.string(), nullable=False),
        pa.field("relation_id", pa.int64(), nullable=False),
        pa.field("relation_version", pa.int32(), nullable=False),
        pa.field("chunk", pa.int32(), nullable=False),
        pa.field("new", TEXTS_TYPE, nullable=False),
    ]
)

RANGES = pa.schema(
    [
        pa.field("epoch", pa.int32(), nullable=False),
        pa.field("schema", pa.string(), nullable=False),
        pa.field("table", pa.string(), nullable=False),
        pa.field("snapshot_lsn", pa.int64(), nullable=False),
        pa.field("relation_id", pa.int64(), nullable=False),
        pa.field("relation_version", pa.int32(), nullable=False),
        pa.field("start_page", pa.int64(), nullable=False),
        pa.field("end_page", pa.int64()),
        pa.field("page_count", pa.int64(), nullable=False),
        pa.field("xmin", pa.int64(), nullable=False),
        pa.field("storage", pa.string(), nullable=False),
        pa.field("row_count", pa.int64(), nullable=False),
        pa.field("byte_count", pa.int64(), nullable=False),
        pa.field("rescued_count", pa.int64(), nullable=False),
        pa.field("began_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("read_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("files", pa.string(), nullable=False),
    ]
)

PREPARED = pa.schema(
    [
        pa.field("epoch", pa.int32(), nullable=False),
        pa.field("prepare_lsn", pa.int64(), nullable=False),
        pa.field("xid", pa.int64(), nullable=False),
        pa.field("gid", pa.string(), nullable=False),
        pa.field("prepared_at", pa.timestamp("us", tz="UTC")),
        pa.field("origin", pa.string()),
        pa.field("row_count", pa.int64()),
        pa.field("ended_by", pa.int64()),
        pa.field("ordinal", pa.int64()),
        DECODED.field("op"),
        pa.field("relation", pa.int32()),
        *map(DECODED.field, ("schema", "table", "old_kind", "old", "new", "unchanged")),
    ]
)

EPOCHS = pa.schema(
    [
        pa.field("epoch", pa.int32(), nullable=False),
        pa.field("start_lsn", pa.int64(), nullable=False),
        pa.field("slot", pa.string(), nullable=False),
        pa.field("publication", pa.string(), nullable=False),
        pa.field("database", pa.string(), nullable=False),
        pa.field("system_identifier", pa.string(), nullable=False),
        pa.field("timeline", pa.int32(), nullable=False),
        pa.field("server_version", pa.int32(), nullable=False),
        pa.field("created_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("shared_through", pa.int64()),
    ]
)

SCHEMA_EVENTS = pa.schema(
    [
        pa.field("epoch", pa.int32(), nullable=False),
        pa.field("lsn", pa.int64(), nullable=False),
        pa.field("schema", pa.string(), nullable=False),
        pa.field("table", pa.string(), nullable=False),
        pa.field("relation_id", pa.int64(), nullable=False),
        pa.field("change", pa.string(), nullable=False),
        pa.field(
            "columns",
            pa.list_(pa.field("element", pa.string(), nullable=False)),
            nullable=False,
        ),
        pa.field("detail", pa.string(), nullable=False),
        pa.field("needs_snapshot", pa.bool_(), nullable=False),
        pa.field("found_by", pa.string(), nullable=False),
        pa.field("recorded_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("seen_at", pa.timestamp("us", tz="UTC")),
    ]
)

WINDOWS = pa.schema(
    [
        pa.field("epoch", pa.int32(), nullable=False),
        pa.field("window", pa.string(), nullable=False),
        pa.field("start_lsn", pa.int64(), nullable=False),
        pa.field("end_lsn", pa.int64(), nullable=False),
        pa.field("row_count", pa.int64(), nullable=False),
        pa.field("transaction_count", pa.int64(), nullable=False),
        pa.field("counts", pa.string(), nullable=False),
        pa.field("first_commit_lsn", pa.int64()),
        pa.field("last_commit_lsn", pa.int64()),
        pa.field("first_commit_ts", pa.timestamp("us", tz="UTC")),
        pa.field("last_commit_ts", pa.timestamp("us", tz="UTC")),
    ]
)

DEFINITIONS = pa.schema(
    [
        pa.field("epoch", pa.int32(), nullable=False),
        pa.field("lsn", pa.int64(), nullable=False),
        pa.field("schema", pa.string(), nullable=False),
        pa.field("table", pa.string(), nullable=False),
        pa.field("relation_id", pa.int64(), nullable=False),
        pa.field("digest", pa.string(), nullable=False),
        pa.field("definition", pa.string(), nullable=False),
    ]
)

TABLE_LIST = pa.schema(
    [
        pa.field("schema", pa.string(), nullable=False),
        pa.field("table", pa.string(), nullable=False),
        pa.field("relation_id", pa.int64(), nullable=False),
        pa.field("state", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("digest", pa.string(), nullable=False),
    ]
)
