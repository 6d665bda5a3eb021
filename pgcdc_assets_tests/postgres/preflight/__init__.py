"""Tests of `pgcdc_assets.postgres.preflight`."""
