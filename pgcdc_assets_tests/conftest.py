"""Loads the fixtures; each family is a file in `fixtures/`."""

pytest_plugins = [
    "pgcdc_assets_tests.fixtures.seed",
    "pgcdc_assets_tests.fixtures.servers",
    "pgcdc_assets_tests.fixtures.database",
    "pgcdc_assets_tests.fixtures.proxy",
    "pgcdc_assets_tests.fixtures.lake",
    "pgcdc_assets_tests.fixtures.capturing",
    "pgcdc_assets_tests.fixtures.spark",
    "pgcdc_assets_tests.fixtures.balance",
    "pgcdc_assets_tests.fixtures.pipeline",
    "pgcdc_assets_tests.fixtures.preflight",
]
