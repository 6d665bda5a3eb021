"""TCP ports of this machine."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Name a port of the loopback address that nobody listened on a moment ago."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
