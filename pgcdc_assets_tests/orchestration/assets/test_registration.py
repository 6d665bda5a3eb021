"""Tables that a run has merged are registered in the catalog of the settings."""

from __future__ import annotations

from dataclasses import replace

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.orchestration.checks.scd import REGISTERED
from pgcdc_assets.settings import CdcTable
from pgcdc_assets.settings.catalog import CatalogPolicy
from pgcdc_assets_tests.orchestration.conftest import NAME, Orchestrated


def _check(own: Orchestrated) -> dg.ExecuteInProcessResult:
    """Run the checks `registered` alone."""
    keys = [
        dg.AssetCheckKey(dg.AssetKey([NAME, f"scd{scd}", "public", table.table]), REGISTERED)
        for table in own.capture.tables
        for scd in table.scd
    ]
    job = dg.define_asset_job("registered_alone", selection=dg.AssetSelection.checks(*keys))
    merged = dg.Definitions.merge(own.location.definitions, dg.Definitions(jobs=[job]))
    return merged.resolve_job_def("registered_alone").execute_in_process(
        instance=own.instance, raise_on_error=False
    )


@pytest.mark.sampled
@pytest.mark.postgres
@pytest.mark.spark
@pytest.mark.slow
def test_merged_tables_have_names_and_a_taken_name_does_not_fail_the_merge(
    orchestrated: Orchestrated, spark: SparkSession
) -> None:
    """SCD1, SCD2 and a table without a key; the name of one table is taken."""
    policy = CatalogPolicy(f"cdc_{orchestrated.database.name}".lower())
    tables = (CdcTable("public", "a", (1, 2)), CdcTable("public", "b"), CdcTable("public", "c"))
    orchestrated.database.execute("create table c (v text)")
    orchestrated.database.execute("alter table c replica identity full")
    orchestrated.database.execute("alter publication pub add table c")
    orchestrated.database.execute("insert into c values ('x'), ('x')")
    capture = replace(orchestrated.capture, tables=tables, catalog=policy)
    own = replace(orchestrated, capture=capture)
    schema = f"{policy.name}.{policy.schema}"
    spark.sql(f"CREATE SCHEMA {schema}")
    try:
        spark.sql(f"CREATE VIEW {schema}.public__b__scd1 AS SELECT 1 AS taken")
        own.copy()
        own.land()
        (request,) = own.tick("merges").run_requests
        merged = own.execute(request, "merge")
        assert merged.success
        assert spark.table(f"{schema}.public__a__scd1").count() == 10
        assert spark.table(f"{schema}.public__a__scd2").where("_is_current").count() == 10
        assert spark.table(f"{schema}.public__c__scd1").count() == 2
        assert spark.table(f"{schema}.public__b__scd1").columns == ["taken"]

        spark.sql(f"DROP TABLE {schema}.public__c__scd1")
        checks = _check(own)
        passed = {
            check.asset_key.path[-1] + check.asset_key.path[1]: check.passed
            for check in checks.get_asset_check_evaluations()
            if check.check_name == REGISTERED
        }
        assert passed == {"ascd1": True, "ascd2": True, "bscd1": False, "cscd1": True}
        assert spark.table(f"{schema}.public__c__scd1").count() == 2
    finally:
        spark.sql(f"DROP SCHEMA IF EXISTS {schema} CASCADE")
    specs = {spec.key: spec for spec in own.location.definitions.resolve_all_asset_specs()}
    history = specs[dg.AssetKey([NAME, "scd2", "public", "a"])]
    assert history.metadata["dagster/table_name"] == f"{schema}.public__a__scd2"
