"""`pgcdc spark`."""

from __future__ import annotations

import argparse
import os

from pgcdc_assets.cli.output import say
from pgcdc_assets.cli.spark_prepare import prepare_spark
from pgcdc_assets.cli.tables import duration
from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.orchestration.project.home import SPARK_VARIABLE, default_lake, state_folder
from pgcdc_assets.raw.lake import ENVIRONMENT_VARIABLE, Lake
from pgcdc_assets.settings.storage import check_lake_uri
from pgcdc_assets.spark.server import SparkServer
from pgcdc_assets.spark.server_process import RunningServer
from pgcdc_assets.spark.settings import CATALOG, HIVE


def run(options: argparse.Namespace) -> int:
    """Prepare this machine, or start, stop or describe the Spark server of this state folder."""
    if options.action == "prepare":
        return _prepare()
    server = SparkServer(state_folder(), read_settings(options), _lakes(options))
    return {"start": _start, "stop": _stop, "status": _status}[options.action](server)


def _prepare() -> int:
    say("Preparing Spark, which takes half a minute; the first time downloads 87 MB of jars")
    archive, is_new = prepare_spark()
    print(f"{'Prepared' if is_new else 'Already prepared'}: {archive}")
    return 0


def read_settings(options: argparse.Namespace) -> dict[str, str]:
    """Return the Spark settings of the options.

    Raises:
        ConfigurationError: a setting has no name or no value.
    """
    settings = {} if options.memory is None else {"spark.driver.memory": options.memory}
    for text in options.conf or ():
        name, separator, value = text.partition("=")
        if not (name.strip() and separator):
            raise ConfigurationError(
                reason=f"--conf takes a Spark setting as NAME=VALUE, such as {CATALOG}={HIVE}"
            )
        settings[name.strip()] = value
    return settings


def _lakes(options: argparse.Namespace) -> list[str]:
    """Return the URIs of the lakes that a server must reach."""
    for uri in options.lake or ():
        check_lake_uri(uri, "--lake")
    if options.lake:
        return list(options.lake)
    uri = Lake.from_environment(default_lake()).uri
    check_lake_uri(uri, ENVIRONMENT_VARIABLE)
    return [uri]


def _start(server: SparkServer) -> int:
    running, is_new = server.start(say)
    print(f"{'Started' if is_new else 'Already running'}: {_described(running)}")
    if os.environ.get(SPARK_VARIABLE, "").strip():
        print(f"{SPARK_VARIABLE} is set in this shell, and takes precedence over this server")
    return 0


def _stop(server: SparkServer) -> int:
    ended = server.stop()
    if ended is None:
        print(f"No Spark server is running in {server.folder}")
    else:
        print(f"Stopped the Spark server, process {ended.pid}")
    return 0


def _status(server: SparkServer) -> int:
    server.check_own()
    found = server.find()
    if found is None:
        print(f"No Spark server is running in {server.folder}: start it by pgcdc spark start")
        return 0
    doing = "" if found.ready else ", still starting"
    if found.ready and not found.answers():
        doing = ", but accepts no connections: end it by pgcdc spark stop"
    print(f"{_described(found)}{doing}")
    print(f"  log {server.log_file}")
    return 0


def _described(server: RunningServer) -> str:
    megabytes = server.resident_bytes / 1e6
    return (
        f"Spark server {server.address}, process {server.pid}, up "
        f"{duration(server.uptime_seconds)}, {megabytes:,.0f} MB of memory"
    )
