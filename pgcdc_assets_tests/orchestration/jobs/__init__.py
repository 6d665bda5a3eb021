"""Tests of `pgcdc_assets.orchestration.jobs`."""
