"""Tests; the folders mirror the package; README.md says what is where."""
