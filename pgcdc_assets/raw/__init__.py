"""The raw zone: Delta tables of all captured changes and snapshots, as Postgres wrote the values.

delta-rs and pyarrow read and write these tables, without a JVM.
"""
