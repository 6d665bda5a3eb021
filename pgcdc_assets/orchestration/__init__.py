"""Dagster: everything that knows it, and nothing else does but the entry points."""
