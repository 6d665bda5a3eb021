"""A project: its folders and Dagster instance, its defs files and its code location."""
