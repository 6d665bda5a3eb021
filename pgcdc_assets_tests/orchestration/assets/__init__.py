"""Tests of `pgcdc_assets.orchestration.assets`."""
