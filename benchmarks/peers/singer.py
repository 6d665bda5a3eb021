"""The two Singer taps for Postgres, which convert wal2json to records as JSON lines.

A tap writes to its standard output, from which a target reads. Here the output is a file, without a
target. With a target, a tap is slower.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.peers.environments import make_venv
from benchmarks.peers.peer import LIMIT_SECONDS, WAL2JSON_SLOT, Reading, Stream, count_lines
from benchmarks.processes import run_measured
from benchmarks.workload import TABLES

# A tap ends after this time without a change, which is subtracted from its duration.
_IDLE_SECONDS = 2

_Json = dict[str, Any]


class _Tap:
    """The common part of both taps: discover the catalog, select tables, count changes."""

    name: str
    plugin = "wal2json"
    slot_source = WAL2JSON_SLOT
    writes = "JSON lines in a file, without a Singer target"
    _bin: Path
    # The entries of a selected stream in the catalog, in its metadata and beside the metadata.
    _of_stream: ClassVar[_Json] = {"replication-method": "LOG_BASED"}
    _of_stream_itself: ClassVar[_Json] = {}

    def slot_name(self, number: int) -> str:
        """Return the name of a slot."""
        return f"peer_{self.name}_{number}"

    def prepare_source(self, stream: Stream) -> None:
        """Do nothing: the tap needs no preparation of the source."""

    def read(self, stream: Stream) -> Reading:
        """Discover the catalog, then read until no change has arrived for some time."""
        tap = str(self._bin / "tap-postgres")
        config = stream.folder / "config.json"
        config.write_text(json.dumps(self._config(stream)))
        found = run_measured([tap, "--config", str(config), "--discover"])
        catalog, output = stream.folder / "catalog.json", stream.folder / "records.jsonl"
        catalog.write_text(json.dumps(self._selected(json.loads(found.output))))
        state = stream.folder / "state.json"
        state.write_text(json.dumps(self._state()))
        # The shell only opens the file, and then executes the tap in its place.
        command = f'exec "$0" "$@" > {output.name}'
        arguments = ("--config", config.name, "--catalog", catalog.name, "--state", state.name)
        usage = run_measured(["bash", "-c", command, tap, *arguments], folder=stream.folder)
        changes = count_lines(output, b'"RECORD"')
        idle = _IDLE_SECONDS if changes >= stream.changes else 0
        return Reading(changes, usage.seconds - idle, usage)

    def _selected(self, catalog: _Json) -> _Json:
        streams = [each for each in catalog["streams"] if each["table_name"] in TABLES]
        for each in streams:
            for part in each["metadata"]:
                part["metadata"] |= {"selected": True}
                if not part["breadcrumb"]:
                    part["metadata"] |= self._of_stream
            each |= self._of_stream_itself
        return {"streams": streams}

    @abstractmethod
    def _config(self, stream: Stream) -> _Json: ...

    @abstractmethod
    def _state(self) -> _Json: ...


class MeltanoTap(_Tap):
    """The tap of MeltanoLabs, with one connection for all tables.

    By default the tap uses a connection for each table. The connections share the slot, and one
    connection advances the slot past changes that another connection has not read.
    """

    name = "meltanolabs_tap_postgres"
    version = "meltanolabs-tap-postgres 0.10.0"
    row = (
        "wal2json's JSON to a record of JSON values: numeric through a float, jsonb as a text, an "
        "array as a list; a delete is a record of the key with `_sdc_deleted_at`; order by LSN"
    )
    _of_stream: ClassVar[_Json] = {"replication-method": "LOG_BASED", "replication-key": "_sdc_lsn"}
    _of_stream_itself: ClassVar[_Json] = {
        "replication_method": "LOG_BASED",
        "replication_key": "_sdc_lsn",
    }

    def prepare(self) -> None:
        """Install the tap."""
        self._bin = make_venv(self.name)

    def _config(self, stream: Stream) -> _Json:
        parts = stream.parameters
        return {
            "host": parts["host"],
            "port": int(parts["port"]),
            "user": parts["user"],
            "password": "unused",
            "database": parts["dbname"],
            "filter_schemas": ["public"],
            "replication_slot_name": stream.slot,
            "replication_idle_exit_seconds": _IDLE_SECONDS,
            "replication_max_run_seconds": LIMIT_SECONDS,
            "log_based_single_connection": True,
        }

    def _state(self) -> _Json:
        return {}


class PipelinewiseTap(_Tap):
    """The tap of PipelineWise.

    The tap lets the server parse each value of an array.
    """

    name = "pipelinewise_tap_postgres"
    version = "pipelinewise-tap-postgres 2.1.0"
    row = (
        "wal2json's JSON to a record of JSON values: numeric through a float, timestamps as texts "
        "in UTC, jsonb as an object, an array parsed by a query for each value; a delete is a "
        "record with `_sdc_deleted_at`"
    )
    _database = "bench"

    def prepare(self) -> None:
        """Install the tap, which needs a Python before 3.10."""
        self._bin = make_venv(self.name, "3.9")

    def slot_name(self, number: int) -> str:
        """Return the name that the tap derives from the database and its own id."""
        return f"pipelinewise_{self._database}_{self._tap_id(number)}"

    @staticmethod
    def _tap_id(number: int) -> str:
        return f"peer{number}"

    def _config(self, stream: Stream) -> _Json:
        parts = stream.parameters
        return {
            "host": parts["host"],
            "port": parts["port"],
            "user": parts["user"],
            "password": "unused",
            "dbname": parts["dbname"],
            "filter_schemas": "public",
            "tap_id": stream.slot.rpartition("_")[2],
            "max_run_seconds": LIMIT_SECONDS,
            "logical_poll_total_seconds": _IDLE_SECONDS,
        }

    def _state(self) -> _Json:
        """Return the state after the snapshots, so that the tap reads the log."""
        bookmark = {"last_replication_method": "LOG_BASED", "lsn": 1, "version": 1}
        bookmarks = {f"public-{table}": bookmark for table in TABLES}
        return {"currently_syncing": None, "bookmarks": bookmarks}
