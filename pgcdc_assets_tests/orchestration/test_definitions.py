"""The sample shop's definitions: their content, and a load without side effects."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import dagster as dg
import pytest

from pgcdc_assets import CdcCapture, CdcTable, PgcdcTranslator, build_cdc_definitions
from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.orchestration.project.code_location import (
    CodeLocation,
    load_defs_folders,
    load_location,
)
from pgcdc_assets.orchestration.project.defs_tables import component_yaml
from pgcdc_assets.orchestration.runs.executor import run_executor
from pgcdc_assets.orchestration.translator import AssetData, Layer
from pgcdc_assets.settings.policies import CheckPolicy, MessagePolicy, RetentionPolicy

ROOT = Path(__file__).resolve().parents[2]
TABLES = ["carts", "customers", "inventory", "order_items", "orders", "products"]


@pytest.fixture(scope="module")
def location() -> CodeLocation:
    return load_location()


@pytest.fixture(scope="module")
def specs(location: CodeLocation) -> dict[str, dg.AssetSpec]:
    found = location.definitions.resolve_all_asset_specs()
    return {spec.key.to_user_string(): spec for spec in found}


def test_keys_are_name_layer_schema_and_table(specs: dict[str, dg.AssetSpec]) -> None:
    expected = {"shop/raw", "shop/snapshot"}
    expected |= {f"shop/source/shop/{table}" for table in TABLES}
    expected |= {f"shop/scd1/shop/{table}" for table in TABLES}
    expected.add("shop/scd2/shop/orders")
    assert set(specs) == expected


def test_lineage_is_from_source_to_raw_and_snapshot_to_scd(
    specs: dict[str, dg.AssetSpec],
) -> None:
    def upstream(key: str) -> set[str]:
        return {dep.asset_key.to_user_string() for dep in specs[key].deps}

    sources = {f"shop/source/shop/{table}" for table in TABLES}
    assert upstream("shop/raw") == sources
    assert upstream("shop/snapshot") == sources
    assert upstream("shop/scd1/shop/orders") == {"shop/raw", "shop/snapshot"}
    assert upstream("shop/source/shop/orders") == set()


def test_every_asset_has_a_description(specs: dict[str, dg.AssetSpec]) -> None:
    for spec in specs.values():
        assert spec.group_name == "shop"
        assert spec.description
        assert spec.kinds
        assert spec.tags["pgcdc/capture"] == "shop"
        assert spec.metadata["dagster/table_name"]
        reference = spec.metadata["dagster/code_references"].code_references[0]
        assert reference.file_path.endswith("defs/shop/defs.yaml")
    assert specs["shop/scd1/shop/orders"].kinds == {"pyspark", "delta"}
    assert specs["shop/raw"].kinds == {"postgres", "delta"}


@pytest.mark.parametrize(
    ("table", "rows"),
    [
        (CdcTable("shop", "t", key=("a", "b")), "one row for each key (a, b)"),
        (CdcTable("shop", "t"), "one row for each row of the source"),
        (CdcTable("shop", "t", without_key="log"), "if the table has no key, one for each change"),
    ],
    ids=["key", "unknown", "log"],
)
def test_the_description_of_an_image_depends_on_the_key_in_the_settings(
    table: CdcTable, rows: str
) -> None:
    definitions = build_cdc_definitions(CdcCapture("mine", "pub", (table,)))
    image = next(s for s in definitions.resolve_all_asset_specs() if "scd1" in s.key.path)
    assert rows in (image.description or "")
    assert ("for each key (" in (image.description or "")) == (table.key is not None)


def test_raw_and_scd_share_the_windows_and_snapshots_are_partitioned_by_table(
    location: CodeLocation,
) -> None:
    graph = location.repository.asset_graph
    raw = graph.get(dg.AssetKey(["shop", "raw"])).partitions_def
    scd = graph.get(dg.AssetKey(["shop", "scd1", "shop", "orders"])).partitions_def
    snapshot = graph.get(dg.AssetKey(["shop", "snapshot"])).partitions_def
    assert isinstance(raw, dg.DynamicPartitionsDefinition)
    assert raw.name == "shop_windows"
    assert scd == raw
    assert isinstance(snapshot, dg.StaticPartitionsDefinition)
    assert snapshot.get_partition_keys() == [f"shop.{table}" for table in TABLES]


def test_source_tables_are_external(location: CodeLocation) -> None:
    graph = location.repository.asset_graph
    external = {key.to_user_string() for key in graph.external_asset_keys}
    assert external == {f"shop/source/shop/{table}" for table in TABLES}


def test_jobs_sensors_pools_and_executor(location: CodeLocation) -> None:
    repository = location.repository
    assert {"shop_capture", "shop_snapshot", "shop_merge", "shop_checks"} <= set(
        repository.job_names
    )
    sensors = {sensor.name: sensor for sensor in repository.sensor_defs}
    assert set(sensors) == {"shop_lag", "shop_merges"}
    for sensor in sensors.values():
        assert sensor.default_status == dg.DefaultSensorStatus.RUNNING
        assert sensor.minimum_interval_seconds is not None
        assert sensor.minimum_interval_seconds <= 5
    for job in ("shop_capture", "shop_snapshot", "shop_merge"):
        assert repository.get_job(job).executor_def is run_executor
    assert location.definitions.executor is run_executor
    pools = {
        node.pool
        for job in repository.get_all_jobs()
        for node in job.all_node_defs
        if isinstance(node, dg.OpDefinition) and node.pool
    }
    assert pools == {
        "pgcdc/shop/slot",
        "pgcdc/shop/snapshot",
        "pgcdc/shop/tables",
        "pgcdc/shop/upkeep",
    }


@pytest.mark.parametrize(("raw_days", "pool"), [(None, None), (7.0, "pgcdc/shop/tables")])
def test_a_maintenance_that_keeps_all_windows_does_not_end_a_merge(
    raw_days: float | None, pool: str | None
) -> None:
    capture = CdcCapture(
        "shop",
        "pub",
        (CdcTable("shop", "orders"),),
        retention=RetentionPolicy(raw_days=raw_days),
    )
    job = build_cdc_definitions(capture).get_job_def("shop_upkeep")
    (step,) = (node for node in job.all_node_defs if node.name == "shop_remove_old_windows")
    assert isinstance(step, dg.OpDefinition)
    assert step.pool == pool


def test_checks_on_demand_run_daily_by_default(
    location: CodeLocation,
) -> None:
    schedules = {schedule.name: schedule for schedule in location.repository.schedule_defs}
    daily = schedules["shop_checks"]
    assert daily.job_name == "shop_checks"
    assert daily.cron_schedule == "47 4 * * *"
    assert daily.default_status == dg.DefaultScheduleStatus.RUNNING
    never = CdcCapture(
        "shop", "pub", (CdcTable("shop", "orders"),), checks=CheckPolicy(schedule=None)
    )
    assert [s.name for s in build_cdc_definitions(never).schedules or []] == ["shop_upkeep"]


@pytest.mark.parametrize("setting", ["checks", "retention"])
def test_an_invalid_schedule_is_refused(setting: str) -> None:
    policies = {"checks": CheckPolicy, "retention": RetentionPolicy}
    capture = CdcCapture(
        "shop",
        "pub",
        (CdcTable("shop", "orders"),),
        **{setting: policies[setting](schedule="daily")},
    )
    with pytest.raises(ConfigurationError, match=rf"{setting}\.schedule is 'daily'"):
        build_cdc_definitions(capture)


def test_a_range_of_windows_is_one_run(location: CodeLocation) -> None:
    graph = location.repository.asset_graph
    for key in (["shop", "raw"], ["shop", "snapshot"], ["shop", "scd1", "shop", "orders"]):
        assert graph.get(dg.AssetKey(key)).backfill_policy == dg.BackfillPolicy.single_run()


def test_captures_are_found_with_their_settings_and_resources(location: CodeLocation) -> None:
    loaded = location.captures["shop"]
    assert loaded.capture.slot == "pgcdc_shop"
    assert loaded.capture.tables[3] == CdcTable(
        "shop", "order_items", (1,), ("order_id", "line_no")
    )
    assert loaded.raw == dg.AssetKey(["shop", "raw"])
    assert loaded.postgres.dsn_env == "PGCDC_DSN"


def test_a_translator_changes_keys_and_lineage_follows() -> None:
    class Ours(PgcdcTranslator):
        def get_asset_spec(self, data: AssetData) -> dg.AssetSpec:
            spec = super().get_asset_spec(data)
            if data.layer is Layer.SCD1:
                spec = spec.replace_attributes(owners=["team:sales"])
            return spec.replace_attributes(key=spec.key.with_prefix("prod"))

    capture = CdcCapture("shop", "shop", (CdcTable("shop", "orders"),))
    definitions = build_cdc_definitions(capture, translator=Ours())
    specs = {s.key.to_user_string(): s for s in definitions.resolve_all_asset_specs()}
    assert "prod/shop/raw" in specs
    orders = specs["prod/shop/scd1/shop/orders"]
    assert orders.owners == ["team:sales"]
    assert {dep.asset_key.to_user_string() for dep in orders.deps} == {
        "prod/shop/raw",
        "prod/shop/snapshot",
    }
    dg.Definitions.validate_loadable(definitions)


def test_two_captures_share_a_code_location() -> None:
    both = dg.Definitions.merge(
        build_cdc_definitions(CdcCapture("one", "one", (CdcTable("a", "t"),))),
        build_cdc_definitions(CdcCapture("two", "two", (CdcTable("a", "t"),))),
    )
    dg.Definitions.validate_loadable(both)


def test_captures_whose_names_begin_alike_share_a_code_location() -> None:
    """Dagster has one namespace for jobs and steps."""
    ends = ("", "_source", "_table", "_append", "_land", "_copy", "_merge", "_rebuild", "_check")
    captures = [
        CdcCapture(f"shop{end}", "shop", (CdcTable("a", "t"),), messages=MessagePolicy())
        for end in ends
    ]
    loaded = dg.Definitions.merge(*map(build_cdc_definitions, captures))
    dg.Definitions.validate_loadable(loaded)
    jobs = {job.name for job in loaded.get_repository_def().get_all_jobs()}
    assert {f"shop{end}_checks" for end in ends} <= jobs


def write_defs(folder: Path, name: str, **attributes: object) -> None:
    import yaml

    (folder / name).mkdir(parents=True)
    document = {
        "type": "pgcdc_assets.PostgresCdcComponent",
        "attributes": {
            "name": name,
            "publication": name,
            "tables": [{"name": "public.t"}],
            **attributes,
        },
    }
    (folder / name / "defs.yaml").write_text(yaml.safe_dump(document))


def names_of(folder: Path) -> set[str]:
    specs = load_defs_folders([folder]).resolve_all_asset_specs()
    return {spec.key.path[0] for spec in specs}


@pytest.mark.parametrize("place", ["defs", "defs/team"])
def test_the_sample_is_omitted_beside_a_capture_of_the_user(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_defs(tmp_path / "defs", "sample", is_sample=True)
    write_defs(tmp_path / place, "mine", windows={"max_age_seconds": 60})
    monkeypatch.delenv("PGCDC_DSN", raising=False)
    assert names_of(tmp_path / "defs") == {"sample", "mine"}
    monkeypatch.setenv("PGCDC_DSN", "postgresql:///mine")
    assert names_of(tmp_path / "defs") == {"mine"}


def test_a_missing_folder_declares_nothing(tmp_path: Path) -> None:
    assert names_of(tmp_path / "nowhere") == set()


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    hidden = {"PGCDC_DSN", "PGCDC_LAKE", "DAGSTER_HOME", "JAVA_HOME"}
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.sampled
@pytest.mark.slow
def test_definitions_validate_with_nothing_running(tmp_path: Path) -> None:
    done = run(
        *("-m", "dagster", "definitions", "validate", "-w", "workspace.yaml"),
        PGCDC_DSN="postgresql://nobody@192.0.2.1:1/nowhere",
        DAGSTER_HOME=str(tmp_path),
        JAVA_HOME="/nonexistent",
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_loading_starts_neither_a_jvm_nor_imports_spark() -> None:
    script = (
        "import json, sys\n"
        "from pgcdc_assets.orchestration.project.code_location import load_location\n"
        "load_location().repository\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))\n"
    )
    done = run("-c", script)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert loaded.isdisjoint({"pyspark", "py4j", "delta", "dagster_pyspark", "pandas"})


@pytest.mark.parametrize(
    ("imported", "absent"),
    [
        ("pgcdc_assets.protocol.relation, pgcdc_assets.raw.zone", "dagster"),
        # Several functions of pyarrow import pandas when they are called.
        ("pgcdc_assets.capture.session", "pandas"),
        ("pgcdc_assets.orchestration.build", "pandas"),
    ],
)
def test_imports_load_no_package_that_they_do_not_need(imported: str, absent: str) -> None:
    done = run("-c", f"import sys, {imported}\nsys.exit({absent!r} in sys.modules)")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("declared", ["in Python", "in YAML", "in a project of the user"])
def test_a_code_server_prints_no_warning_about_beta_features(
    declared: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dagster converts check definitions of another class, outside of this package's code."""
    capture = CdcCapture("shop", "pub", (CdcTable("public", "orders"),))
    folder = tmp_path / "users_project" / "defs" / "shop"
    folder.mkdir(parents=True)
    text = component_yaml(capture.name, capture.publication, capture.tables, slot=capture.slot)
    (folder / "defs.yaml").write_text(text)
    if declared == "in Python":
        definitions = build_cdc_definitions(capture)
    elif declared == "in YAML":
        definitions = load_defs_folders([folder.parent])
    else:
        monkeypatch.syspath_prepend(str(tmp_path))
        for package in ("users_project", "users_project/defs"):
            (tmp_path / package / "__init__.py").touch()
        (tmp_path / "pyproject.toml").write_text(
            '[tool.dg]\ndirectory_type = "project"\n'
            '[tool.dg.project]\nroot_module = "users_project"\n'
        )
        definitions = dg.load_from_defs_folder(path_within_project=folder)
    repository = definitions.get_repository_def()
    with warnings.catch_warnings(record=True, action="always") as caught:
        assert repository.asset_checks_defs_by_key
    assert [str(warning.message) for warning in caught] == []
