"""Tests of `pgcdc_assets.merge.fold`."""
