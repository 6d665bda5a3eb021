"""Tests of `pgcdc_assets.capture`."""
