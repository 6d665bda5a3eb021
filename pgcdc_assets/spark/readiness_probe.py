"""`python -m pgcdc_assets.spark.readiness_probe`: test of a Spark Connect server by one query.

The probe is a process of its own: the process that starts a server does not load PySpark, and does
not hang on a server that accepts connections without a reply. The probe reads the server's address
from standard input, because the address contains a token and other users can read a command line.

On one machine the probe writes and reads a small Delta table, which tests Spark, Delta and the
folder. The server also loads many classes that the first merge needs. The executors of a cluster do
not see the folder: there the probe computes on an executor, and loads Delta's catalog. At the end
the probe remembers the jars that the server has resolved, for the next start.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from typing import Any

from pyspark.sql.connect.session import SparkSession

from pgcdc_assets.spark.jars import MASTER, is_one_machine, remember_jars
from pgcdc_assets.spark.sql import delta_table

_POLL_SECONDS = 0.1


def main() -> None:
    """Read a request as JSON; exit with 0 after a query succeeds.

    The request has `remote` and `port` of the server, a `folder`, and the server's settings `conf`.
    """
    request: dict[str, Any] = json.load(sys.stdin)
    _wait_for_port(request["port"])
    session = SparkSession.builder.remote(request["remote"]).create()
    try:
        if is_one_machine(request["conf"][MASTER]):
            _write_and_read(session, f"{request['folder']}/probe")
        else:
            _compute(session)
        remember_jars(request["conf"], session.conf.get("spark.jars", "") or "")
    finally:
        session.stop()


def _wait_for_port(port: int) -> None:
    """Wait until the port accepts connections. Exit if the parent process ends.

    The parent process has the time limit.
    """
    parent = os.getppid()
    while os.getppid() == parent:
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(_POLL_SECONDS)
    sys.exit(1)


def _write_and_read(session: SparkSession, path: str) -> None:
    session.range(3).write.format("delta").mode("overwrite").save(path)
    read = session.sql(f"SELECT id FROM {delta_table(path)}").collect()
    if len(read) != 3:
        raise RuntimeError(f"three rows were written, but {len(read)} rows were read")


def _compute(session: SparkSession) -> None:
    # Spark loads the class of its catalog when the catalog is first used.
    session.sql("SHOW CURRENT NAMESPACE").collect()
    rows = session.range(3).collect()
    if len(rows) != 3:
        raise RuntimeError(f"three rows were computed, but {len(rows)} rows were read")


if __name__ == "__main__":
    main()
