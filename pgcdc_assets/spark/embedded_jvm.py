"""The JVM of an embedded session.

PySpark passes the settings of a session to its JVM as arguments of `spark-submit`, which every user
of the machine can read while the JVM runs. So the JVM is launched here, before PySpark needs it,
and reads its settings from a file. PySpark then sets them again, through its connection to the JVM.
"""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from pyspark import SparkContext
from pyspark.errors import PySparkRuntimeError

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.spark.jars import JARS, MASTER, PACKAGES, is_one_machine
from pgcdc_assets.spark.java import find_java
from pgcdc_assets.spark.properties_file import properties_file

# PySpark adds the arguments in this variable to its own.
_ARGUMENTS = "PYSPARK_SUBMIT_ARGS"
_DEFAULT_ARGUMENTS = "pyspark-shell"
_PROPERTIES = "--properties-file"
_EXTRA = "--extra-properties-file"
_NOT_LAUNCHED = "JAVA_GATEWAY_EXITED"


def with_jvm(conf: Mapping[str, str]) -> dict[str, str]:
    """Launch the JVM of this process, unless it runs, and return the settings of a session in it.

    PySpark replaces the resolved jars of its JVM by the setting `spark.jars`. The executors of a
    cluster would get the jars of this setting only, so the returned setting has all jars.

    Raises:
        ConfigurationError: the JVM cannot start.
    """
    # PySpark's own lock of the launch.
    with SparkContext._lock:
        if SparkContext._gateway is None:
            _launch(conf)
    if not conf.get(JARS) or not conf.get(PACKAGES) or is_one_machine(conf.get(MASTER, "")):
        return dict(conf)
    java: Any = SparkContext._jvm
    return {**conf, JARS: java.java.lang.System.getProperty(JARS) or conf[JARS]}


def _launch(conf: Mapping[str, str]) -> None:
    """Launch the JVM, and once more if the first launch ends at once.

    PySpark forks this process to launch a JVM. If the process also uses gRPC (a Spark Connect
    client, Dagster), the fork can end in a handler of gRPC before it becomes a JVM. Seen once.

    Raises:
        ConfigurationError: the JVM has ended twice. It prints the reason to the standard error.
    """
    with (
        tempfile.TemporaryDirectory(prefix="pgcdc-spark-") as folder,
        properties_file(conf, Path(folder)) as file,
        _submit_arguments(file),
        _ending_unfinished_launch(file),
    ):
        try:
            _launch_once()
        except ConfigurationError:
            _launch_once()


def _launch_once() -> None:
    try:
        SparkContext._ensure_initialized()
    except PySparkRuntimeError as error:
        if error.getCondition() != _NOT_LAUNCHED:
            raise
        raise ConfigurationError(
            reason=f"Spark did not start, because its JVM ({find_java()}) ended. The JVM printed "
            "the reason, such as a wrong option in spark.driver.extraJavaOptions, more memory in "
            "spark.driver.memory than the machine has, or a module that this Java lacks. Correct "
            "the capture's spark_config, or set JAVA_HOME to the folder of a whole Java 17 or 21."
        ) from None


@contextmanager
def _ending_unfinished_launch(file: Path) -> Iterator[None]:
    """End the processes of a launch that an interrupt ends.

    PySpark removes the folder in which the JVM announces its port (`launch_gateway` in
    pyspark/java_gateway.py). The main thread of the JVM would fail, and its other threads would
    keep it in memory without a client.

    Args:
        file: the properties file, which is on the command lines of the launch.
    """
    try:
        yield
    except BaseException:
        if SparkContext._gateway is None:
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    if str(file) in process.cmdline():
                        process.kill()
        raise


@contextmanager
def _submit_arguments(file: Path) -> Iterator[None]:
    """Add a properties file to the arguments of PySpark's `spark-submit` for the block."""
    before = os.environ.get(_ARGUMENTS)
    given = _DEFAULT_ARGUMENTS if before is None else before
    if _PROPERTIES in given or _EXTRA in given:
        # Of several files, Spark uses the last one of the first option, which is the user's own,
        # and takes a setting from the last one of the other option.
        own = [_EXTRA, str(file)]
    else:
        own = [_PROPERTIES, str(file), "--load-spark-defaults"]
    words = shlex.split(given)
    # Behind this word, Spark reads no option.
    end = words.index(_DEFAULT_ARGUMENTS) if _DEFAULT_ARGUMENTS in words else len(words)
    os.environ[_ARGUMENTS] = shlex.join([*words[:end], *own, *words[end:]])
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ARGUMENTS]
        else:
            os.environ[_ARGUMENTS] = before
