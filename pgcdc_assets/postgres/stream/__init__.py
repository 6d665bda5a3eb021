"""The replication connection: transport, status packets and errors."""
