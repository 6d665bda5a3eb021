"""Load the fixtures of `support/` as plugins."""

pytest_plugins = [
    "pgcdc_assets_tests.support.signals",
    "pgcdc_assets_tests.support.seed",
    "pgcdc_assets_tests.support.sampling",
    "pgcdc_assets_tests.support.servers",
    "pgcdc_assets_tests.support.database",
    "pgcdc_assets_tests.support.standby",
    "pgcdc_assets_tests.support.proxy",
    "pgcdc_assets_tests.support.tls_server",
    "pgcdc_assets_tests.support.dagster_storage",
    "pgcdc_assets_tests.support.lake",
    "pgcdc_assets_tests.support.object_store",
    "pgcdc_assets_tests.support.captures",
    "pgcdc_assets_tests.support.spark",
    "pgcdc_assets_tests.support.cluster",
    "pgcdc_assets_tests.support.balance",
    "pgcdc_assets_tests.support.pipeline",
    "pgcdc_assets_tests.support.preflight",
    "pgcdc_assets_tests.support.orchestration.location",
]
