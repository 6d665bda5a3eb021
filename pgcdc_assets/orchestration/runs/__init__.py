"""Dagster runs: records, processes, claims, and failures."""
