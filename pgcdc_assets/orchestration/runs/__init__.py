"""Runs of Dagster: records, processes, claims, and how they end."""
