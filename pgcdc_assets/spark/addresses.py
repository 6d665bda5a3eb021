"""Addresses of Spark: of a Connect server, and of the machines of a cluster."""

from __future__ import annotations

import re
import socket
from urllib.parse import urlsplit

import psutil

from pgcdc_assets.errors import ConfigurationError, TransientError

DEFAULT_PORT = 15002
LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
_LOCAL_SECONDS = 5
_ANSWER_SECONDS = 30
_MAX_PORT = 65535
_ADDRESS = re.compile(
    r"sc://(?:[^\s/:;@?#\[\]]+|\[[0-9a-fA-F:.]+\])(?::(?P<port>\d{1,6}))?(?:/(?:;.*)?)?"
)


def shown(remote: str) -> str:
    """Return a server's address without its parameters, which may contain a secret."""
    return remote.partition("/;")[0]


def check_address(remote: str, setting: str) -> None:
    """Check the form of a server's address.

    Args:
        setting: the name of the setting that holds the address.

    Raises:
        ConfigurationError: the address has another form. The error does not contain the address,
            because its parameters may contain a secret.
    """
    match = _ADDRESS.fullmatch(remote)
    if match is None or int(match["port"] or DEFAULT_PORT) > _MAX_PORT:
        raise ConfigurationError(
            reason=f"{setting} is not the address of a Spark Connect server: write it as "
            f"sc://HOST:PORT or sc://HOST:PORT/;NAME=VALUE (default port: {DEFAULT_PORT})"
        )


def is_on_this_machine(remote: str) -> bool:
    """Return whether a server's address is an address of this machine."""
    host = urlsplit(shown(remote)).hostname or ""
    if host in LOCAL_HOSTS:
        return True
    own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    try:
        return any(found[4][0] in own for found in socket.getaddrinfo(host, None))
    except OSError:
        return False


def check_listens(remote: str) -> None:
    """Check that a local server accepts connections. Servers on other machines are not checked.

    Raises:
        TransientError: the server does not.
    """
    place = urlsplit(shown(remote))
    host = place.hostname or ""
    if host not in LOCAL_HOSTS:
        return
    try:
        with socket.create_connection((host, place.port or DEFAULT_PORT), _LOCAL_SECONDS):
            return
    except OSError as error:
        raise TransientError(
            reason=f"No Spark server listens at {shown(remote)} ({error.strerror}). Check that the "
            "server runs, and run it again"
        ) from error


def check_answers(remote: str) -> None:
    """Check that a server answers, with or without TLS as its address says.

    PySpark repeats its first request for many minutes if the host does not exist, or drops the
    packets, or if one side uses TLS only.

    Raises:
        TransientError: the server does not answer.
    """
    # Commands that need no session do not load these modules.
    import grpc
    from pyspark.sql.connect.client import DefaultChannelBuilder

    channel = DefaultChannelBuilder(remote).toChannel()
    try:
        grpc.channel_ready_future(channel).result(timeout=_ANSWER_SECONDS)
    except grpc.FutureTimeoutError:
        raise TransientError(
            reason=f"The Spark server at {shown(remote)} does not answer within {_ANSWER_SECONDS} "
            "s. Check its host and port, that it runs, and that it uses TLS only if the address "
            "has use_ssl=true, or a token and another host than localhost. Then run it again"
        ) from None
    finally:
        channel.close()
