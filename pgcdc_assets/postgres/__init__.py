"""Access to the source database: SQL, replication, copies, digests and the pre-flight check."""
