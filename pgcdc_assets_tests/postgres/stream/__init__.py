"""Tests of `pgcdc_assets.postgres.stream`."""
