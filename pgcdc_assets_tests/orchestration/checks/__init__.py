"""Tests of `pgcdc_assets.orchestration.checks`."""
