"""Tests of `pgcdc_assets.demo`: server, shop and run."""
