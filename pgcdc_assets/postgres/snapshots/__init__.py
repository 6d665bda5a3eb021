"""Exported snapshots with an exact LSN, without a replication slot."""
