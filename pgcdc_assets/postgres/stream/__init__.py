"""A replication connection: its bytes, its clock, its errors."""
