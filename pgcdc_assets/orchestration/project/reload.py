"""Reload of the code location by a sensor, after which the definitions have new tables.

`dagster dev` and `dagster code-server start` run a server that keeps its address, and starts a new
process with the code at each reload. Web server and daemon detect the new process. Runs continue in
their own processes. A sensor cannot reload the server of `dagster api grpc`, nor a process that a
web server or a daemon starts for itself.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import dagster as dg
from dagster._core.remote_origin import GrpcServerCodeLocationOrigin

# The sensor's evaluation ends before its process is replaced.
_DELAY_SECONDS = 2.0
_TIMEOUT_SECONDS = 120
# A server that cannot reload answers the request without a change.
_REPEAT_SECONDS = 600.0

REQUESTED = "the code location is being reloaded"
NOT_RELOADED = (
    "reload the code location; a code server of `dagster code-server start` is reloaded by itself"
)


@dataclass
class LocationReload:
    """The reloads that this process has requested."""

    _wanted: object = None
    _requested_at: float = 0.0

    def request(self, context: dg.SensorEvaluationContext, wanted: object) -> str:
        """Reload the code location after a delay, and return a sentence about the reload.

        Args:
            wanted: the content that the definitions lack. The reload is repeated after an interval.
        """
        origin = context.code_location_origin
        if not isinstance(origin, GrpcServerCodeLocationOrigin):
            return NOT_RELOADED
        ago = time.monotonic() - self._requested_at
        if self._wanted == wanted and ago < _REPEAT_SECONDS:
            # This line is reached only until the reload replaces the process.
            return REQUESTED if ago < _TIMEOUT_SECONDS else NOT_RELOADED
        self._wanted, self._requested_at = wanted, time.monotonic()
        thread = threading.Thread(target=_reload, args=(origin,), name="pgcdc-reload", daemon=True)
        thread.start()
        return REQUESTED


def _reload(origin: GrpcServerCodeLocationOrigin) -> None:
    time.sleep(_DELAY_SECONDS)
    origin.create_client().reload_code(timeout=_TIMEOUT_SECONDS)
