"""Dagster definitions of a capture. Besides the entry points, only this package uses Dagster."""
