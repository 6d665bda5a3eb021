"""Tests of pgcdc_assets. The folders mirror the package; see README.md."""
