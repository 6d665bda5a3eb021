"""The demonstration: an embedded Postgres, a sample shop with live changes, and the pipeline."""
