"""Capture from the source to the raw zone: snapshots, windows of changes and epochs."""
