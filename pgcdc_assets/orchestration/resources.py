"""Dagster resources of a capture: source database, lake, Spark.

The resources are lazy: a connection or a session is opened when an asset or a sensor uses the
resource, not when definitions load or a run starts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import dagster as dg
from pydantic import Field, ValidationInfo, field_validator

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.orchestration.project import home
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.raw.lake import ENVIRONMENT_VARIABLE, Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings.policies import SnapshotPolicy
from pgcdc_assets.settings.storage import check_credential_settings, check_lake_uri, storage_of
from pgcdc_assets.settings.variables import check_variable_name
from pgcdc_assets.spark.object_store import (
    bucket_options,
    check_reachable,
    find_folder_warning,
    start_options,
    store_of,
)
from pgcdc_assets.spark.server import SparkServer

if TYPE_CHECKING:
    from pgcdc_assets.postgres.connection import Connection
    from pgcdc_assets.spark.session import SparkSession


@contextmanager
def open_resources(
    resources: Mapping[str, Any], instance: dg.DagsterInstance | None = None
) -> Iterator[Any]:
    """Initialise resources outside of a run.

    Args:
        instance: None: a temporary instance, which takes a fifth of a second.

    Raises:
        ConfigurationError: an environment variable that a resource reads is not set, or a value has
            a wrong type or is not valid. The error quotes no value.
    """
    with ExitStack() as held:
        try:
            opened = held.enter_context(dg.build_resources(resources, instance))
        except dg.DagsterInvalidConfigError as error:
            reason = " ".join(dict.fromkeys(map(_explained, error.errors)))
            # The text of Dagster's error quotes values, which may be passwords.
            raise ConfigurationError(reason=reason) from None
        except dg.DagsterUserCodeExecutionError as error:
            if isinstance(error.user_exception, ConfigurationError):
                raise error.user_exception from None
            raise
        yield opened


def _explained(error: Any) -> str:
    """Return a sentence about a wrong field of a resource."""
    resource, *_, field = error.stack.levels or ["?"]
    place = f"`{field}` of the resource {resource}"
    variable = re.search(r'env(?:ironment)? variable "(\w+)"', error.message)
    if variable is None:
        return f"Correct {place}: its value has a wrong type."
    if "is not set" in error.message:
        return f"Set the environment variable {variable[1]}, which {place} reads."
    return f"Correct the environment variable {variable[1]}: its value is no valid {place}."


class PostgresResource(dg.ConfigurableResource[None]):
    """The source database of one capture."""

    capture: str = Field(description="The capture's name, shown in application_name.")
    conninfo: str | None = Field(
        default=None,
        description="libpq URI or key=value string; give it as an EnvVar, since it holds a "
        "secret. Unset: taken from the variable below when it is needed.",
    )
    dsn_env: str = Field(
        default=home.DSN_VARIABLE,
        description="Environment variable with the libpq URI; PGCDC_DSN unset means the embedded "
        "server.",
    )
    primary_dsn_env: str | None = Field(
        default=None,
        description="If the source is a standby: environment variable with the libpq URI of its "
        "primary, which helps the creation of slots.",
    )
    connect_timeout: int = 10
    statement_timeout_ms: int = 30_000
    lock_timeout_ms: int = 10_000

    @field_validator("dsn_env", "primary_dsn_env")
    @classmethod
    def _check_variable(cls, text: str | None, info: ValidationInfo) -> str | None:
        if text is not None:
            check_variable_name(text, str(info.field_name))
        return text

    def settings(self) -> ConnectionSettings:
        """Return the connection settings.

        Raises:
            ConfigurationError: no connection string is set, and no embedded server runs; or the
                environment variable of the primary is not set.
        """
        settings = ConnectionSettings(
            conninfo=self.conninfo or home.conninfo(self.dsn_env),
            name=self.capture,
            connect_timeout=self.connect_timeout,
            statement_timeout_ms=self.statement_timeout_ms,
            lock_timeout_ms=self.lock_timeout_ms,
            variable=home.DSN_VARIABLE if self.conninfo else self.dsn_env,
        )
        if self.primary_dsn_env is None:
            return settings
        primary = _settings_at(settings, "primary_dsn_env", self.primary_dsn_env, "the primary")
        return replace(settings, primary=primary)

    def standby_settings(self, policy: SnapshotPolicy) -> ConnectionSettings | None:
        """Return the connection settings of the standby that copies read from; None without one.

        Raises:
            ConfigurationError: the environment variable of the standby is not set.
        """
        if policy.dsn_env is None:
            return None
        settings = replace(self.settings(), primary=None)
        return _settings_at(settings, "snapshot.dsn_env", policy.dsn_env, "a standby")

    def query_connection(self, purpose: str) -> AbstractContextManager[Connection]:
        """Open a time-limited SQL connection in autocommit mode."""
        return query_connection(self.settings(), purpose)


def _settings_at(
    settings: ConnectionSettings, setting: str, variable: str, server: str
) -> ConnectionSettings:
    """Return the connection settings of another server, which an environment variable names."""
    conninfo = os.environ.get(variable, "").strip()
    if not conninfo:
        raise ConfigurationError(
            reason=f"{setting} names the environment variable {variable}, which is not set. Set it "
            f"to the libpq URI of {server}, or remove {setting}."
        )
    return replace(settings, conninfo=conninfo, variable=variable)


class LakeResource(dg.ConfigurableResource[None]):
    """The lake: the raw zone and the SCD tables."""

    uri: str | None = Field(
        default=None,
        description="Folder or object-store URI; unset: PGCDC_LAKE, else .pgcdc/lake.",
    )
    storage: dict[str, str] = Field(
        default={}, description="The settings of an S3 store, fields of `Storage`, as texts."
    )
    storage_options: dict[str, str] = Field(
        default={}, description="Further options of delta-rs for the object store; no secrets."
    )

    @field_validator("storage")
    @classmethod
    def _check_variables(cls, settings: dict[str, str]) -> dict[str, str]:
        check_credential_settings(settings)
        return settings

    def lake(self) -> Lake:
        """Return the lake's address.

        Raises:
            ConfigurationError: the address or a setting of the store is wrong.
        """
        uri = self.uri or Lake.from_environment(home.default_lake()).uri
        check_lake_uri(uri, "lake" if self.uri else ENVIRONMENT_VARIABLE)
        return Lake(uri, self.storage_options, storage_of(self.storage))

    def zone(self, capture: str) -> RawZone:
        """Return the raw zone of a capture."""
        return RawZone(self.lake(), capture)


class SparkResource(dg.ConfigurableResource[None]):
    """The Spark session of merges: on a Spark Connect server, or embedded in this process."""

    remote: str | None = Field(
        default=None,
        description="Spark Connect address (sc://host:15002), or `local` for an embedded session; "
        "unset: PGCDC_SPARK_REMOTE, else the server of `pgcdc spark start` if it runs, else an "
        "embedded session.",
    )
    spark_config: dict[str, str] = Field(
        default={}, description="Spark settings over the defaults."
    )
    hive: bool = Field(
        default=False,
        description="The catalog of an embedded session is a Hive metastore, and a server without "
        "a metastore is not used. Its address is a Spark setting.",
    )

    def with_hive(self) -> Self:
        """Return the resource whose session has a Hive metastore."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**{**fields, "hive": True})

    def session(self, lake: Lake) -> SparkSession:
        """Return the session; the first call starts it.

        The run's log has a warning if the lake is a local folder that the executors of a cluster
        may not reach.

        Args:
            lake: the lake that the session reads and writes.

        Raises:
            ConfigurationError: the address is malformed; or this process has an embedded session
                and cannot use a server; or
                the server is on another machine and the lake is a local folder; or the embedded
                session was started without the jars of the lake's store.
            TransientError: the server does not answer.
        """
        # Import here: definitions must load without dagster-pyspark and Spark.
        from dagster_pyspark import LazyPySparkResource

        from pgcdc_assets.spark.addresses import check_address, is_on_this_machine, shown
        from pgcdc_assets.spark.embedded_jvm import with_jvm
        from pgcdc_assets.spark.jars import MASTER
        from pgcdc_assets.spark.session import (
            check_started_for,
            connecting,
            runs_embedded,
            set_lake,
            started,
        )
        from pgcdc_assets.spark.settings import (
            CATALOG,
            HIVE,
            embedded_conf,
            start_conf,
            with_user_conf,
        )

        remote = self._chosen_remote()
        if remote is None and not runs_embedded():
            remote = self._own_server(lake)
        remote = None if remote == home.EMBEDDED_SPARK else remote
        if remote is not None:
            check_address(remote, "spark_remote" if self.remote else home.SPARK_VARIABLE)
            check_reachable(lake.uri, shown(remote), is_on_this_machine(remote))
        bucket = bucket_options(lake.uri, lake.storage)
        master = self.spark_config.get(MASTER)
        conf = {"spark.remote": remote} if remote else embedded_conf(master)
        if remote is None and self.hive:
            conf[CATALOG] = HIVE
        config = with_user_conf({"spark.app.name": "pgcdc", **conf}, self.spark_config)
        if remote is None:
            config = start_options([lake.uri], config)
            if runs_embedded():
                check_started_for(lake.uri)
        with connecting(remote):
            used = config if remote else with_jvm(start_conf(config))
            resource = LazyPySparkResource(spark_config=used)
            started_session = started(resource.spark_session, config)
            session = set_lake(started_session, bucket)
            if lake.is_local:
                # The driver of a server on this machine may use a cluster too.
                _warn_about_folder(lake, str(session.conf.get(MASTER, "local")))
            return session

    def _chosen_remote(self) -> str | None:
        return self.remote or os.environ.get(home.SPARK_VARIABLE, "").strip() or None

    def _own_server(self, lake: Lake) -> str | None:
        """Find the server of this state folder.

        Spark reads many settings only when a session starts. A capture with Spark settings
        therefore starts its own session, and so does a capture with a lake in an object store if
        the server was started without the store's connector, or a capture whose catalog is a
        metastore if the server has none.
        """
        if self.spark_config:
            return None
        server = SparkServer(home.state_folder()).usable()
        store = store_of(lake.uri)
        if server is None or (store and store not in server.stores):
            return None
        if self.hive and not server.has_hive:
            return None
        return server.remote


def _warn_about_folder(lake: Lake, master: str) -> None:
    warning = find_folder_warning(lake.uri, master, _is_here(master))
    if warning:
        dg.get_dagster_logger().warning(warning)


def _is_here(master: str) -> bool:
    """Return whether a master is in the driver's process, or a standalone one on this machine."""
    from pgcdc_assets.spark.addresses import is_on_this_machine

    scheme, _, places = master.partition("://")
    if scheme != "spark":
        return scheme.startswith("local")
    return all(is_on_this_machine(f"spark://{place}") for place in places.split(","))
