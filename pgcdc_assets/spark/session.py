"""Spark sessions: how one is started, and what every merge needs of one.

The same code runs in an embedded session and against a Spark Connect server, so nothing here or in
the other modules of `merge` reaches for the JVM, but to see whether it has ended. Settings that
decide what is written (time zone, timestamp type, ANSI) are set on the session that merges and not
left to whoever started it.

A session on a server lives there until it is released, an hour after its last use otherwise. So
whatever is opened here is closed again: sessions of a merge when it ends, a process's own one when
the process ends.
"""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any
from urllib.parse import urlsplit

from py4j.protocol import Py4JNetworkError
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from pgcdc_assets.errors import ConfigurationError, TransientError
from pgcdc_assets.spark.errors import text_of
from pgcdc_assets.spark.jars import looking_up_alone
from pgcdc_assets.spark.java import check_java
from pgcdc_assets.spark.settings import SESSION_CONF, embedded_conf

# A server of this machine that refuses connections is gone. The client would try again for ten
# minutes, which is meant for clusters behind a network.
_LOCAL_RETRIES = 4
_LOCAL_SECONDS = 5
_SECONDS_TO_EXIT = 3
_DEFAULT_PORT = 15002
_LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})

# How PySpark notes that a process talks to a server: its functions then build Connect columns.
_IN_CONNECT_MODE = "SPARK_CONNECT_MODE_ENABLED"


def spark_session(
    app_name: str, *, remote: str | None = None, conf: Mapping[str, str] | None = None
) -> SparkSession:
    """Start or reuse a session.

    Args:
        remote: address of a Spark Connect server (`sc://host:port`); None starts an embedded
            session.
        conf: settings that come on top of ours.

    Raises:
        ConfigurationError: an embedded session runs in this process, so it cannot use a server.
        TransientError: the server does not answer.
    """
    with connecting(remote):
        builder = SparkSession.builder.appName(app_name)
        settings = {**(SESSION_CONF if remote else embedded_conf()), **(conf or {})}
        if remote:
            builder = builder.remote(remote)
        for key, value in settings.items():
            builder = builder.config(key, value)
        return settled(builder.getOrCreate())


def runs_embedded() -> bool:
    """Say whether this process has an embedded session, beside which it cannot use a server."""
    return SparkContext._active_spark_context is not None


@contextmanager
def connecting(remote: str | None) -> Iterator[None]:
    """Make the process ready for a builder's `getOrCreate`, and say what is wrong if it fails.

    A process may have a session on another server, or on one that was restarted since, or whose
    session ended for being idle: such a one is dropped, or `getOrCreate` would return it.

    Args:
        remote: the server's address; None for an embedded session.

    Raises:
        ConfigurationError: an embedded session runs in this process, so it cannot use a server; or
            there is no Java to start one with.
        TransientError: the server does not answer.
    """
    if remote and runs_embedded():
        raise ConfigurationError(
            reason="This process has an embedded Spark session already, so it cannot use the Spark "
            f"server at {shown(remote)}: run them one after the other"
        )
    known = _connected()
    if known is not None and not (remote and _serves(known, remote)):
        _drop(known)
    if remote is None:
        os.environ.pop(_IN_CONNECT_MODE, None)
    else:
        _check_listens(remote)
    starts_here = remote is None and not runs_embedded()
    if starts_here:
        check_java()
    try:
        with looking_up_alone() if starts_here else nullcontext():
            yield
    except PySparkException as error:
        if remote is None:
            raise
        raise TransientError(
            reason=f"The Spark server at {shown(remote)} does not answer "
            f"({error.getCondition() or type(error).__name__}): see that it runs, and run it again"
        ) from error


def settled(session: SparkSession) -> SparkSession:
    """See that a session on a server is released when the process ends."""
    client = _client(session)
    if client is not None:
        _retry_briefly(client)
        atexit.unregister(_release_known)
        atexit.register(_release_known)
    return session


def has_ended(session: SparkSession, error: Exception) -> bool:
    """Say whether the work of a session failed because its JVM, or its server here, is gone.

    A JVM that has begun to exit fails its work in many ways, so an embedded one is given some
    seconds to be gone. Of a server on another machine nobody knows.
    """
    client = _client(session)
    if client is None:
        if isinstance(error, (Py4JNetworkError, ConnectionError)) or text_of(error) is None:
            return True
        return not isinstance(error, PySparkException) and _exits_soon(session)
    try:
        _check_listens(f"sc://{client._builder.endpoint}")
    except TransientError:
        return True
    return False


def shown(remote: str) -> str:
    """Write a server's address without what may be secret in it."""
    return remote.partition("/;")[0]


def own_session(spark: SparkSession) -> SparkSession:
    """Open a session beside the given one, with settings and temporary views of its own.

    Delta takes a MERGE's application transaction from the session's settings, so tables that are
    merged side by side must not share a session. Give it back by `release_session`.
    """
    session: SparkSession
    if _client(spark) is None:
        session = spark.newSession()
    else:
        server_side: Any = spark
        # A server knows a session from its first request on, and clones only what it knows.
        spark.conf.get("spark.sql.session.timeZone")
        session = server_side.cloneSession()
        _retry_briefly(_client(session))
        # Else each session has a class loader of its own, and Spark compiles for it anew what it
        # compiled for the merge before. It is there for sessions that bring classes; ours do not.
        session.conf.set("spark.sql.artifact.isolation.alwaysApplyClassloader", "false")
    for key, value in SESSION_CONF.items():
        session.conf.set(key, value)
    return session


def activate(session: SparkSession) -> None:
    """Make a session the one that this thread works with.

    A checkpoint over Connect comes back as a DataFrame of the thread's active session, whatever
    session took it (`proto_to_remote_cached_dataframe` in PySpark 4.2), and no other session knows
    it.
    """
    if _client(session) is not None:
        connect_session: Any = type(session)
        connect_session._active_session.session = session


def release_session(session: SparkSession) -> None:
    """End a session that `own_session` opened; on a server it would stay for an hour."""
    client = _client(session)
    if client is None or client.is_closed:
        return
    try:
        client.release_session()
    except PySparkException:
        # The server is gone, or ended the session by itself: there is nothing to release.
        pass
    finally:
        client.close()
        # A client waits for the process's end to tidy up, and would be kept until then.
        atexit.unregister(client._on_exit)


@contextmanager
def own_sessions(spark: SparkSession, count: int) -> Iterator[list[SparkSession]]:
    """Open sessions beside the given one for the block."""
    opened: list[SparkSession] = []
    try:
        for _ in range(count):
            opened.append(own_session(spark))
        yield opened
    finally:
        for session in opened:
            release_session(session)


def _exits_soon(session: SparkSession) -> bool:
    process = getattr(session.sparkContext._gateway, "proc", None)
    if process is None:
        return False
    try:
        process.wait(timeout=_SECONDS_TO_EXIT)
    except subprocess.TimeoutExpired:
        return False
    return True


def _client(session: SparkSession) -> Any:
    """The connection of a session on a server; None for an embedded one."""
    return None if hasattr(session, "newSession") else session.client


def _connected() -> Any:
    """The session that this process has on a server, if any."""
    if _IN_CONNECT_MODE not in os.environ:
        return None
    from pyspark.sql.connect.session import SparkSession as ConnectSession

    return ConnectSession.getActiveSession() or ConnectSession._get_default_session()


def _serves(session: Any, remote: str) -> bool:
    """Whether a session is on that server, and the server still knows it."""
    place = urlsplit(shown(remote)).netloc
    if session.client._builder.endpoint not in (place, f"{place}:{_DEFAULT_PORT}"):
        return False
    try:
        session.conf.get("spark.sql.session.timeZone")
    except PySparkException:
        return False
    return True


def _check_listens(remote: str) -> None:
    """See that a server of this machine takes connections."""
    place = urlsplit(shown(remote))
    host = place.hostname or ""
    if host not in _LOCAL_HOSTS:
        return
    try:
        with socket.create_connection((host, place.port or _DEFAULT_PORT), _LOCAL_SECONDS):
            return
    except OSError as error:
        raise TransientError(
            reason=f"No Spark server listens at {shown(remote)} ({error.strerror}): see that it "
            "runs, and run it again"
        ) from error


def _drop(session: Any) -> None:
    """Release a process's own session, and let the next builder make a new one."""
    from pyspark.sql.connect.session import SparkSession as ConnectSession

    release_session(session)
    if ConnectSession._default_session is session:
        ConnectSession._default_session = None
    if getattr(ConnectSession._active_session, "session", None) is session:
        ConnectSession._active_session.session = None


def _release_known() -> None:
    known = _connected()
    if known is not None:
        _drop(known)


def _retry_briefly(client: Any) -> None:
    if client.host in _LOCAL_HOSTS:
        from pyspark.sql.connect.client.retries import DefaultPolicy

        client.set_retry_policies([DefaultPolicy(max_retries=_LOCAL_RETRIES)])
