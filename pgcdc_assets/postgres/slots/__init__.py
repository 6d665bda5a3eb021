"""Replication slots: creation, status, health and the lease of a capture."""
