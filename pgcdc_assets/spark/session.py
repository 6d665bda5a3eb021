"""Spark sessions: start, settings and release, embedded and on a Spark Connect server.

The same code runs in an embedded session and against a Spark Connect server, so neither this module
nor `merge` accesses the JVM, except to detect its end and its connectors. Settings that determine
written values (time zone, timestamp type, ANSI mode) are set on each merging session, independent
of the session's builder.

A server keeps a session until the session is released, or for an hour after its last use. This
package therefore releases every session: a merge's sessions at the end of the merge, and the
process's session at the end of the process.
"""

from __future__ import annotations

import atexit
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any
from urllib.parse import urlsplit

from py4j.protocol import Py4JJavaError, Py4JNetworkError
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession as SparkSession

from pgcdc_assets.errors import ConfigurationError, TransientError
from pgcdc_assets.settings.storage import BUCKET_PREFIX, is_s3, scheme_of
from pgcdc_assets.spark.addresses import (
    DEFAULT_PORT,
    LOCAL_HOSTS,
    check_answers,
    check_listens,
    shown,
)
from pgcdc_assets.spark.embedded_jvm import with_jvm
from pgcdc_assets.spark.errors import condition_of, text_of
from pgcdc_assets.spark.interrupts import end_jobs_at_interrupts, keeping_interrupt_handler
from pgcdc_assets.spark.jars import MASTER, looking_up_alone, remember_jars
from pgcdc_assets.spark.java import check_java
from pgcdc_assets.spark.object_store import LOG_STORE, store_of
from pgcdc_assets.spark.settings import SESSION_CONF, embedded_conf, start_conf, with_user_conf

# A local server that refuses connections has ended. By default the client retries for ten minutes,
# which suits clusters behind a network.
_LOCAL_RETRIES = 4
_SECONDS_TO_EXIT = 3

# PySpark sets this variable in a client of a server: its functions then build Connect columns.
_IN_CONNECT_MODE = "SPARK_CONNECT_MODE_ENABLED"
# PySpark writes the texts of errors to standard error with these loggers, also of handled errors. A
# text may quote values of rows, and Dagster shows the standard error of a run.
_LOGGERS_OF_TEXTS = ("DataFrameQueryContextLogger", "SQLQueryContextLogger")
_RAW_LITERALS = "spark.sql.parser.escapedStringLiterals"
# By default each session of a server has its own class loader, in the driver and in each executor,
# and Spark compiles the same generated code once per class loader. Sessions without uploaded
# classes do not need a class loader.
_SHARED_CLASSES = {
    "spark.sql.artifact.isolation.enabled": "false",
    "spark.sql.artifact.isolation.alwaysApplyClassloader": "false",
}


def spark_session(
    app_name: str, *, remote: str | None = None, conf: Mapping[str, str] | None = None
) -> SparkSession:
    """Return a session, new or reused.

    Args:
        app_name: the application's name in Spark.
        remote: address of a Spark Connect server (`sc://host:port`); None: an embedded session.
        conf: settings that override the package's settings.

    Raises:
        ConfigurationError: a server is requested, but the process has an embedded session; or an
            embedded session is requested, but Java is missing.
        TransientError: the server does not answer.
    """
    with connecting(remote):
        builder = SparkSession.builder.appName(app_name)
        own = SESSION_CONF if remote else embedded_conf((conf or {}).get(MASTER))
        settings = with_user_conf(own, conf or {})
        if remote:
            builder = builder.remote(remote)
        used = settings if remote else with_jvm(start_conf(settings))
        for key, value in used.items():
            builder = builder.config(key, value)
        return started(_with_escapes(builder.getOrCreate()), settings)


def started(session: SparkSession, conf: Mapping[str, str]) -> SparkSession:
    """Return a session that this process started, with what follows from its start arranged.

    The process remembers the jars that an embedded session has resolved, ends the session's jobs
    at an interrupt, and releases a session on a server at its end. PySpark's loggers of the texts
    of errors are disabled.

    Args:
        session: the session.
        conf: the requested settings, before `start_conf`.
    """
    for name in _LOGGERS_OF_TEXTS:
        PySparkLogger.getLogger(name).disabled = True
    if _client(session) is None:
        # Not the session's setting `spark.jars`: PySpark replaces the resolved jars by `conf`'s.
        properties: Any = SparkContext._jvm
        remember_jars(conf, properties.java.lang.System.getProperty("spark.jars") or "")
        end_jobs_at_interrupts()
    return release_at_exit(session)


def runs_embedded() -> bool:
    """Return whether this process has an embedded session, and therefore cannot use a server."""
    return SparkContext._active_spark_context is not None


def check_started_for(uri: str) -> None:
    """Check that this process's embedded session was started with the connector of a lake's store.

    Raises:
        ConfigurationError: the lake is in an object store, and the session has no connector for it,
            or no LogStore for S3.
    """
    context = SparkContext._active_spark_context
    if context is not None and store_of(uri) and not _has_connector(context, uri):
        raise ConfigurationError(
            reason=f"The embedded Spark session of this process was started for another lake, "
            f"without the jars of the object store that {uri} needs. Use one process for each "
            "lake, or a Spark server: pgcdc spark start --lake"
        )


def _has_connector(context: SparkContext, uri: str) -> bool:
    if is_s3(uri):
        return context.getConf().contains(LOG_STORE)
    java: Any = context._jvm
    hadoop = context._jsc.hadoopConfiguration()
    try:
        java.org.apache.hadoop.fs.FileSystem.getFileSystemClass(scheme_of(uri), hadoop)
    except Py4JJavaError:
        return False
    return True


@contextmanager
def connecting(remote: str | None) -> Iterator[None]:
    """Prepare the process for a builder's `getOrCreate`, and convert the errors of the block.

    A session of this process on another server, on a restarted server, or that the server has
    ended, is dropped, because `getOrCreate` would return this session.

    Args:
        remote: the server's address; None: an embedded session.

    Raises:
        ConfigurationError: a server is requested, but the process has an embedded session; or an
            embedded session is requested, but Java is missing.
        TransientError: the server does not answer.
    """
    if remote and runs_embedded():
        raise ConfigurationError(
            reason="This process has an embedded Spark session already, so the process cannot use "
            f"the Spark server at {shown(remote)}. Use one process for each"
        )
    known = _connected()
    is_reused = known is not None and remote is not None and _serves(known, remote)
    if known is not None and not is_reused:
        _drop(known)
    if remote is None:
        os.environ.pop(_IN_CONNECT_MODE, None)
    else:
        check_listens(remote)
    starts_here = remote is None and not runs_embedded()
    if starts_here:
        check_java()
    try:
        if remote is not None and not is_reused:
            check_answers(remote)
        with looking_up_alone() if starts_here else nullcontext(), keeping_interrupt_handler():
            yield
    except PySparkException as error:
        if remote is None:
            raise
        raise TransientError(
            reason=f"The Spark server at {shown(remote)} does not answer "
            f"({condition_of(error)}). Check that the server runs, and "
            "run it again"
        ) from error


def release_at_exit(session: SparkSession) -> SparkSession:
    """Return the session, which is released at the end of the process if it is on a server."""
    client = _client(session)
    if client is not None:
        _retry_briefly(client)
        atexit.unregister(_release_known)
        atexit.register(_release_known)
    return session


def session_has_ended(session: SparkSession, error: Exception) -> bool:
    """Return whether a session's work failed because its JVM, or its local server, has ended.

    A JVM that is exiting raises various errors, so the function waits some seconds for the end of
    an embedded JVM. The end of a server on another machine is not detected.
    """
    client = _client(session)
    if client is None:
        if isinstance(error, (Py4JNetworkError, ConnectionError)) or text_of(error) is None:
            return True
        return not isinstance(error, PySparkException) and _exits_soon(session)
    try:
        check_listens(f"sc://{client._builder.endpoint}")
    except TransientError:
        return True
    return False


def own_session(spark: SparkSession) -> SparkSession:
    """Open another session of the same Spark, with its own settings and temporary views.

    Delta reads a MERGE's application transaction from the session's settings, so tables that are
    merged in parallel must not share a session. Release the session by `release_session`.
    """
    session: SparkSession
    if _client(spark) is None:
        session = set_lake(spark.newSession(), _bucket_settings(spark))
    else:
        server_side: Any = spark
        # A request creates the session, of which the server makes a copy. The copy reads these
        # settings at its first request, and never again.
        for key, value in _SHARED_CLASSES.items():
            spark.conf.set(key, value)
        session = server_side.cloneSession()
        _retry_briefly(_client(session))
    for key, value in SESSION_CONF.items():
        session.conf.set(key, value)
    return _with_escapes(session)


def set_lake(session: SparkSession, options: Mapping[str, str]) -> SparkSession:
    """Return the session, which reaches the bucket of a lake.

    Args:
        options: the settings of `object_store.bucket_options`. Sessions of `own_session` get them.
    """
    for name, value in options.items():
        session.conf.set(name, value)
    return session


def activate(session: SparkSession) -> None:
    """Make a session the active session of this thread.

    Over Connect, `checkpoint` returns a DataFrame of the thread's active session, whatever session
    the checkpoint belongs to (`proto_to_remote_cached_dataframe` in PySpark 4.2).
    """
    if _client(session) is not None:
        connect_session: Any = type(session)
        connect_session._active_session.session = session


def release_session(session: SparkSession) -> None:
    """End a session of `own_session`. A server would keep the session for an hour."""
    client = _client(session)
    if client is None or client.is_closed:
        return
    try:
        client.release_session()
    except PySparkException:
        # The server has ended, or has ended the session.
        pass
    finally:
        client.close()
        # The exit handler would keep the closed client in memory until the process ends.
        atexit.unregister(client._on_exit)


@contextmanager
def own_sessions(spark: SparkSession, count: int) -> Iterator[list[SparkSession]]:
    """Open `count` sessions by `own_session` for the block."""
    opened: list[SparkSession] = []
    try:
        for _ in range(count):
            opened.append(own_session(spark))
        yield opened
    finally:
        for session in opened:
            release_session(session)


def _bucket_settings(session: SparkSession) -> dict[str, str]:
    # One call for all names: PySpark's `getAll` needs some calls for each setting.
    names = session._jsparkSession.conf().getAll().keys().mkString("\n").splitlines()
    return {n: str(session.conf.get(n)) for n in names if n.startswith(BUCKET_PREFIX)}


def _with_escapes(session: SparkSession) -> SparkSession:
    """Return the session, in which a backslash in a string literal begins an escape.

    Spark prints a warning if the setting is set, so a session with the default is left alone.
    """
    if session.conf.get(_RAW_LITERALS) != "false":
        session.conf.set(_RAW_LITERALS, "false")
    return session


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
    """Return the client of a session on a server; None for an embedded session."""
    return None if hasattr(session, "newSession") else session.client


def _connected() -> Any:
    """Return the session of this process on a server; None without such a session."""
    if _IN_CONNECT_MODE not in os.environ:
        return None
    from pyspark.sql.connect.session import SparkSession as ConnectSession

    return ConnectSession.getActiveSession() or ConnectSession._get_default_session()


def _serves(session: Any, remote: str) -> bool:
    """Return whether a session is on the server at `remote`, and has not ended."""
    place = urlsplit(shown(remote)).netloc
    if session.client._builder.endpoint not in (place, f"{place}:{DEFAULT_PORT}"):
        return False
    try:
        session.conf.get("spark.sql.session.timeZone")
    except PySparkException:
        return False
    return True


def _drop(session: Any) -> None:
    """Release the process's session, so that the next builder creates a new session."""
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
    if client.host in LOCAL_HOSTS:
        from pyspark.sql.connect.client.retries import DefaultPolicy

        client.set_retry_policies([DefaultPolicy(max_retries=_LOCAL_RETRIES)])
