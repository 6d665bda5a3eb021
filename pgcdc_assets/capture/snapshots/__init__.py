"""Snapshots of tables into the raw zone."""
