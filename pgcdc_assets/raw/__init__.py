"""The raw zone: what was captured, as Postgres wrote it, in Delta tables without a JVM."""
