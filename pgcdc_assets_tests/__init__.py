"""Tests; the folders mirror the package, `behaviours/` has one file per theme of CDC behaviour."""
