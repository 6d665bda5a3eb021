"""Tests of `pgcdc_assets.tables`."""
