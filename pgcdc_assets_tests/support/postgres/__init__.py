"""Helpers of the tests of `pgcdc_assets.postgres`."""
