"""Tests of `pgcdc_assets.orchestration.project`."""
