"""Tests of `pgcdc_assets.merge.batch`."""
