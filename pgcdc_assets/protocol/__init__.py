"""Decoding of pgoutput's bytes to Arrow, without I/O and without a clock.

Sources: Postgres documentation 53.4 Streaming Replication Protocol, 53.5 Logical Streaming
Replication Protocol and 53.9 Logical Replication Message Formats; Postgres source files
src/backend/replication/pgoutput/pgoutput.c and src/backend/replication/logical/proto.c.
"""
