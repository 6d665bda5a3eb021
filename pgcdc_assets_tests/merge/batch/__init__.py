"""Tests of `pgcdc_assets.merge.kinds`."""
