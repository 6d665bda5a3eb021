"""Tests of `pgcdc_assets.cli`."""
