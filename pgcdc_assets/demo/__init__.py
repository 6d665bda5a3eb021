"""The demonstration: a Postgres of its own, a sample shop with live changes, and the whole run."""
