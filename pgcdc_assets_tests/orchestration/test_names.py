"""Definitions of tables with every kind of name that Postgres allows."""

from __future__ import annotations

import dagster as dg

from pgcdc_assets import CdcCapture, CdcTable, build_cdc_definitions
from pgcdc_assets.orchestration.assets.scd import find_scd_tables
from pgcdc_assets.orchestration.checks.invariants import INVARIANTS
from pgcdc_assets.orchestration.jobs.sync_passes import FailedParts
from pgcdc_assets.orchestration.project.code_location import CodeLocation, find_captures
from pgcdc_assets.orchestration.translator import AssetData, PgcdcTranslator
from pgcdc_assets.table_name import encode_name

# These names would be equal or invalid as names of Dagster outputs and inputs.
NAMES = [
    ("public", "a-b"),
    ("public", "a_b"),
    ("public", "a.b"),
    ("public", "A_B"),
    ("public", "a_b_invariants"),
    ("public", "a...b"),
    ("public_a", "b"),
    ("public__a", "b"),
    ("public", "a__b"),
    ("a.b", "c"),
    ("a", "b.c"),
    ("public", 'Order "Lines"\n100% a=b/c\\d[e]*?#~'),
    ("with space", " "),
    ("public", "straße😀"),
    ("public", '"' * 63),
    ("public", "."),
]


class Numbered(PgcdcTranslator):
    """Gives the assets keys without the names of their tables."""

    def get_asset_spec(self, data: AssetData) -> dg.AssetSpec:
        spec = super().get_asset_spec(data)
        if data.table is None:
            return spec
        number = data.capture.tables.index(data.table)
        return spec.replace_attributes(key=dg.AssetKey(f"{data.layer.value}_{number}"))


def location(*names: tuple[str, str], translator: PgcdcTranslator | None = None) -> CodeLocation:
    tables = tuple(CdcTable(schema, table, (1, 2)) for schema, table in names)
    capture = CdcCapture("shop", "pub", tables)
    definitions = build_cdc_definitions(capture, translator=translator)
    return CodeLocation(definitions, find_captures(definitions))


def test_definitions_load_with_every_legal_name() -> None:
    loaded = location(*NAMES)
    dg.Definitions.validate_loadable(loaded.definitions)
    graph = loaded.repository.asset_graph
    for layer in ("source", "scd1", "scd2"):
        assert len([k for k in graph.get_all_asset_keys() if k.path[1] == layer]) == len(NAMES)
    snapshot = graph.get(dg.AssetKey(["shop", "snapshot"]))
    assert snapshot.partitions_def is not None
    assert len(set(snapshot.partitions_def.get_partition_keys())) == len(NAMES)
    sources = {key for key in graph.get_all_asset_keys() if key.path[1] == "source"}
    assert graph.get(dg.AssetKey(["shop", "raw"])).parent_keys == sources
    assert snapshot.parent_keys == sources


def test_special_characters_are_encoded_in_the_key_as_in_the_lake_s_folder() -> None:
    graph = location(("a/b", "Order Lines")).repository.asset_graph
    key = dg.AssetKey(["shop", "scd1", "a~2f~b", "Order~20~Lines"])
    assert graph.has(key)
    assert dg.AssetCheckKey(key, INVARIANTS) in graph.asset_check_keys
    assert graph.get(key).metadata["dagster/table_name"] == 'shop.scd1."a/b"."Order Lines"'


def test_earlier_names_keep_their_keys_outputs_and_partitions() -> None:
    loaded = location(("sales", "order_items"), ("Sales", "a-b.C"))
    graph = loaded.repository.asset_graph
    assert graph.has(dg.AssetKey(["shop", "scd1", "sales", "order_items"]))
    assert graph.has(dg.AssetKey(["shop", "source", "Sales", "a-b.C"]))
    snapshot = graph.get(dg.AssetKey(["shop", "snapshot"])).partitions_def
    assert snapshot is not None
    assert snapshot.get_partition_keys() == ["sales.order_items", "Sales.a-b.C"]
    merge = loaded.repository.get_job("shop_merge").get_node_named("shop_merge_tables")
    outputs = {output.name for output in merge.definition.output_defs}
    assert {
        "shop__scd1__sales__order_items",
        "shop__scd1__sales__order_items_invariants",
    } <= outputs


def test_captures_are_found_with_the_names_of_their_tables() -> None:
    found = location(*NAMES).captures["shop"].capture
    assert found.table_names == NAMES


def test_the_table_of_a_failed_merge_is_found_by_its_key() -> None:
    """Another pass of a sync heals a table that the source has altered during the run."""
    loaded = location(*NAMES)
    capture = loaded.captures["shop"].capture
    tables = find_scd_tables(loaded.repository, capture)
    assert len(tables) == 2 * len(NAMES)
    for name in NAMES:
        key = dg.AssetKey(["shop", "scd2", *map(encode_name, name)])
        failed = FailedParts((), (), [tables[key]]).tables(capture)
        assert list(failed) == [name]
    numbered = location(*NAMES, translator=Numbered())
    tables = find_scd_tables(numbered.repository, capture)
    for scd in (1, 2):
        keys = [dg.AssetKey(f"scd{scd}_{number}") for number in range(len(NAMES))]
        assert [tables[key].name for key in keys] == NAMES
