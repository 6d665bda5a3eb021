"""Tests of `pgcdc_assets.orchestration.sensors`."""
