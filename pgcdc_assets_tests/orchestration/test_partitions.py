"""The dependency of windows on snapshots, as resolved by Dagster."""

from __future__ import annotations

from collections.abc import Iterator

import dagster as dg
import pytest
from dagster._core.definitions.data_version import CachingStaleStatusResolver, StaleStatus
from dagster._core.definitions.partitions.context import partition_loading_context
from dagster._core.loader import LoadingContextForTest
from dagster._core.remote_representation.external_data import RepositorySnap
from dagster._serdes import deserialize_value, serialize_value

from pgcdc_assets import CdcCapture, CdcTable, build_cdc_definitions

SNAPSHOT, RAW = dg.AssetKey(["t", "snapshot"]), dg.AssetKey(["t", "raw"])
A, HISTORY_OF_A, B = (
    dg.AssetKey(["t", kind, "public", table])
    for kind, table in (("scd1", "a"), ("scd2", "a"), ("scd1", "b"))
)
WINDOWS = [f"0001-{n:016X}-{n + 1:016X}" for n in range(2)]


@pytest.fixture(scope="module")
def repository() -> dg.RepositoryDefinition:
    tables = (CdcTable("public", "a", (1, 2)), CdcTable("public", "b"))
    definitions = build_cdc_definitions(CdcCapture("t", "pub", tables))
    return definitions.get_repository_def()


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions("t_windows", WINDOWS)
        yield instance


def materialize(instance: dg.DagsterInstance, key: dg.AssetKey, *partitions: str) -> None:
    for partition in partitions:
        instance.report_runless_asset_event(dg.AssetMaterialization(key, partition=partition))


def status(
    repository: dg.RepositoryDefinition, instance: dg.DagsterInstance, key: dg.AssetKey
) -> set[StaleStatus]:
    context = LoadingContextForTest(instance)
    resolver = CachingStaleStatusResolver(instance, repository.asset_graph, context)
    return {resolver.get_status(key, window) for window in WINDOWS}


def test_a_snapshot_makes_only_the_windows_of_its_table_stale(
    repository: dg.RepositoryDefinition, instance: dg.DagsterInstance
) -> None:
    materialize(instance, SNAPSHOT, "public.a", "public.b")
    for key in (RAW, A, HISTORY_OF_A, B):
        materialize(instance, key, *WINDOWS)
    fresh, stale = {StaleStatus.FRESH}, {StaleStatus.STALE}
    assert [status(repository, instance, key) for key in (A, HISTORY_OF_A, B)] == [fresh] * 3

    materialize(instance, SNAPSHOT, "public.a")
    assert [status(repository, instance, key) for key in (A, HISTORY_OF_A, B)] == [
        stale,
        stale,
        fresh,
    ]


def test_dagster_finds_the_windows_and_the_snapshot_that_belong_together(
    repository: dg.RepositoryDefinition, instance: dg.DagsterInstance
) -> None:
    graph = repository.asset_graph
    with partition_loading_context(dynamic_partitions_store=instance):
        for key, table in ((A, "public.a"), (HISTORY_OF_A, "public.a"), (B, "public.b")):
            above = graph.get_parent_partition_keys_for_child(WINDOWS[0], SNAPSHOT, key)
            assert list(above.partitions_subset.get_partition_keys()) == [table]
            above = graph.get_parent_partition_keys_for_child(WINDOWS[0], RAW, key)
            assert list(above.partitions_subset.get_partition_keys()) == WINDOWS[:1]
        below = graph.get_child_partition_keys_of_parent("public.b", SNAPSHOT, B)
        assert set(below) == set(WINDOWS)
        assert not set(graph.get_child_partition_keys_of_parent("public.b", SNAPSHOT, A))


def test_the_web_server_reads_the_mappings_without_this_package(
    repository: dg.RepositoryDefinition,
) -> None:
    sent = serialize_value(RepositorySnap.from_def(repository))
    received = deserialize_value(sent, RepositorySnap)
    mappings = {
        node.asset_key: edge.partition_mapping
        for node in received.asset_nodes
        for edge in node.parent_edges
        if edge.parent_asset_key == SNAPSHOT
    }
    for key, table in ((A, "public.a"), (HISTORY_OF_A, "public.a"), (B, "public.b")):
        mapping = mappings[key]
        assert type(mapping) is dg.SpecificPartitionsPartitionMapping
        assert mapping.partition_keys == [table]
