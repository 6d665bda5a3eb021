"""Read a number of changes of a slot by pydbzengine. The program runs in its own environment.

The file `result.txt` gets the number of written changes, and the seconds from the last change to
the end of the program. The standard output has the engine's log.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# These packages are not installed in the environment of mypy.
pydbzengine: Any = importlib.import_module("pydbzengine")


def main() -> None:
    """Run the engine, and stop it after the last change."""
    destination, wanted, limit_seconds, *connection = sys.argv[1:]
    handle = {"lines": write_lines, "iceberg": write_iceberg}[destination]()
    is_complete = threading.Event()
    written = 0

    def handle_batch(self: object, records: list[Any]) -> None:
        nonlocal written
        # A tombstone has no value.
        changes = [record for record in records if record.value() is not None]
        handle(changes)
        written += len(changes)
        if written >= int(wanted):
            is_complete.set()

    # A class statement would have a base class that is unknown to the type checker.
    bases = (pydbzengine.BasePythonChangeHandler,)
    handler = type("Handler", bases, {"handleJsonBatch": handle_batch})()
    engine = pydbzengine.DebeziumJsonEngine(properties(*connection), handler)
    thread = threading.Thread(target=engine.run, daemon=True)
    thread.start()
    end = time.monotonic() + float(limit_seconds)
    while thread.is_alive() and time.monotonic() < end and not is_complete.wait(0.05):
        pass
    completed = time.monotonic()
    engine.close()
    Path("result.txt").write_text(f"{written} {time.monotonic() - completed}")


def properties(
    host: str, port: str, database: str, user: str, slot: str, publication: str
) -> dict[str, str]:
    """Return the connector's properties: no snapshot, batches larger than the default of 2,048."""
    return {
        "name": "peer",
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "offset.storage": "org.apache.kafka.connect.storage.FileOffsetBackingStore",
        "offset.storage.file.filename": str(Path("offsets.dat").absolute()),
        "offset.flush.interval.ms": "1000",
        "database.hostname": host,
        "database.port": port,
        "database.user": user,
        "database.password": "unused",
        "database.dbname": database,
        "topic.prefix": "peer",
        "plugin.name": "pgoutput",
        "slot.name": slot,
        "publication.name": publication,
        "publication.autocreate.mode": "disabled",
        "snapshot.mode": "no_data",
        "schema.include.list": "public",
        "tombstones.on.delete": "false",
        "key.converter.schemas.enable": "false",
        "value.converter.schemas.enable": "false",
        "max.batch.size": "16384",
        "max.queue.size": "65536",
    }


def write_lines() -> Callable[[list[Any]], None]:
    """Return a handler that writes a line for each change and syncs the file after each batch."""
    file = Path("changes.jsonl").open("w", encoding="utf-8")

    def handle(changes: list[Any]) -> None:
        file.writelines(f"{change.value()}\n" for change in changes)
        file.flush()
        os.fsync(file.fileno())

    return handle


def write_iceberg() -> Callable[[list[Any]], None]:
    """Return pydbzengine's handler that appends each batch to Iceberg tables."""
    handlers: Any = importlib.import_module("pydbzengine.handlers.iceberg")
    catalogs: Any = importlib.import_module("pyiceberg.catalog.sql")
    folder = Path.cwd()
    catalog = catalogs.SqlCatalog(
        "peer", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}/warehouse"
    )
    catalog.create_namespace("peer")
    handler = handlers.IcebergChangeHandler(catalog, ("peer",))

    def handle(changes: list[Any]) -> None:
        handler.handleJsonBatch(changes)

    return handle


if __name__ == "__main__":
    main()
