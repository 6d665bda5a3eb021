"""Postgres change data capture as Dagster assets, merged by Spark into Delta Lake tables."""
