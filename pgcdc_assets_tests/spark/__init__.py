"""Tests of `pgcdc_assets.spark`."""
