"""Tests of `pgcdc_assets.orchestration.runs`."""
