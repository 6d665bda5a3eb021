"""Tests of `pgcdc_assets.verify`."""
