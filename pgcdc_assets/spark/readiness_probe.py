"""`python -m pgcdc_assets.spark.readiness_probe`: waits for a Spark server, and works on it once.

A process of its own, so that whoever starts a server neither loads PySpark nor hangs on a server
that takes connections and says nothing. The address comes on standard input: it holds a token, and
a command line is for everybody to read.

A tiny Delta table is written and read: so Spark, Delta and the folder are all there. The server has
then loaded much of what its first merge would else wait for.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from typing import Any

from pyspark.sql.connect.session import SparkSession

from pgcdc_assets.spark.sql import delta_table

_POLL_SECONDS = 0.1


def main() -> None:
    """Read `{"remote": ..., "port": ..., "folder": ...}`; end with 0 once a query worked."""
    asked: dict[str, Any] = json.load(sys.stdin)
    _wait_for_port(asked["port"])
    session = SparkSession.builder.remote(asked["remote"]).create()
    try:
        _write_and_read(session, f"{asked['folder']}/probe")
    finally:
        session.stop()


def _wait_for_port(port: int) -> None:
    """Wait for as long as the process lives that started this one: the limit is its own."""
    starter = os.getppid()
    while os.getppid() == starter:
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(_POLL_SECONDS)
    sys.exit(1)


def _write_and_read(session: SparkSession, path: str) -> None:
    session.range(3).write.format("delta").mode("overwrite").save(path)
    read = session.sql(f"SELECT id FROM {delta_table(path)}").collect()
    if len(read) != 3:
        raise RuntimeError("a table of three rows was written, and others were read")


if __name__ == "__main__":
    main()
