"""A capture declared in YAML.

type: pgcdc_assets.PostgresCdcComponent
attributes:
  name: shop
  publication: shop
  tables:
    - {name: shop.orders, key: [id], scd: [1]}
"""

from __future__ import annotations

import os
from pathlib import Path

import dagster as dg
from dagster.components.resolved.base import Resolvable
from pydantic import Field

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.orchestration.build import build_cdc_definitions
from pgcdc_assets.orchestration.project import home
from pgcdc_assets.orchestration.resources import LakeResource, PostgresResource, SparkResource
from pgcdc_assets.orchestration.translator import PgcdcTranslator
from pgcdc_assets.settings import (
    CdcCapture,
    CdcTable,
    CheckPolicy,
    RetentionPolicy,
    StepLimit,
    StreamPolicy,
    WindowPolicy,
)


class TableModel(dg.Model, Resolvable):
    """One table: its name and, where the defaults do not fit, its key and its SCD tables."""

    name: str = Field(description="schema.table")
    key: list[str] | None = Field(
        default=None, description="Columns that identify a row; default: the replica identity."
    )
    scd: list[int] = Field(
        default=[1], description="1: the current image; 2: the history; [1, 2]: both."
    )
    tracked: list[str] | None = Field(
        default=None,
        description="Columns whose change opens a version in the history; default: all.",
    )
    soft_deletes: bool = Field(
        default=False, description="Keep deleted rows in the current image, and mark them."
    )
    without_key: str = Field(
        default="bag",
        description="For a table without a key. bag: its rows with their duplicates; log: its "
        "changes one after the other.",
    )

    def table(self) -> CdcTable:
        """Check the settings."""
        return CdcTable.parse(
            self.name, self.scd, self.key, self.tracked, self.soft_deletes, self.without_key
        )


class WindowModel(dg.Model, Resolvable):
    """When a window is opened, and how large it may be."""

    max_bytes: int = Field(default=WindowPolicy.max_bytes, description="WAL bytes of one window.")
    min_bytes: int = Field(
        default=WindowPolicy.min_bytes, description="Waiting WAL bytes that open a window at once."
    )
    max_age_seconds: float = Field(
        default=WindowPolicy.max_age_seconds,
        description="Waiting WAL of any size opens a window this long after the last landing.",
    )
    retry_seconds: float = Field(
        default=WindowPolicy.retry_seconds,
        description="Pause before a failed window is tried again; doubled each time.",
    )
    max_retry_seconds: float = Field(
        default=WindowPolicy.max_retry_seconds, description="The longest such pause."
    )
    run_seconds: float = Field(
        default=WindowPolicy.run_seconds,
        description="A sensor's run goes on with the next windows for so long while changes come.",
    )
    keep: int = Field(default=WindowPolicy.keep, description="Partition keys to hold.")


class StreamModel(dg.Model, Resolvable):
    """The clocks and sizes of the replication stream."""

    batch_bytes: int = Field(
        default=StreamPolicy.batch_bytes, description="Bytes decoded together."
    )
    status_seconds: float = Field(
        default=StreamPolicy.status_seconds, description="Between two status packets at most."
    )
    silence_seconds: float = Field(
        default=StreamPolicy.silence_seconds,
        description="A connection that is silent for so long is given up.",
    )
    total_seconds: float | None = Field(
        default=None, description="A capture that takes longer is given up and tried again."
    )
    slot_wait_seconds: float = Field(
        default=StreamPolicy.slot_wait_seconds,
        description="How long the walsender of a dead run may keep the slot.",
    )


class RetentionModel(dg.Model, Resolvable):
    """What is kept for how long, and when upkeep runs."""

    raw_days: float | None = Field(
        default=None,
        description="Raw windows that are merged everywhere go after so many days; default: never.",
    )
    old_version_hours: float = Field(
        default=RetentionPolicy.old_version_hours,
        description="How long files that a merge has replaced stay for readers; 1 or more.",
    )
    old_version_days: float | None = Field(
        default=None,
        description="The same in days; 1 or more. Where it is set, the hours do not count.",
    )
    replaced_ratio: float = Field(
        default=RetentionPolicy.replaced_ratio,
        description="Replaced files of that age are deleted after a merge once they have so many "
        "times the bytes of the table.",
    )
    schedule: str = Field(
        default=RetentionPolicy.schedule, description="Cron expression of the upkeep, in UTC."
    )


class StepModel(dg.Model, Resolvable):
    """How much one commit of a merge folds at most."""

    changes: int = Field(default=StepLimit.changes, description="Changes of the table.")
    bytes: int = Field(default=StepLimit.bytes, description="Bytes of these changes as text.")


class CheckModel(dg.Model, Resolvable):
    """When the checks run that read the source or whole tables."""

    schedule: str | None = Field(
        default=CheckPolicy.schedule,
        description="Cron expression of the job <name>_checks, in UTC; null: no schedule.",
    )


class PostgresCdcComponent(dg.Component, dg.Model, Resolvable):
    """Captures a Postgres publication, and keeps tables of it in the lake.

    For a capture named `shop`: one external asset for each source table, `shop/raw` with one
    partition for each window of WAL, `shop/snapshot` with one partition for each table, and for
    each table an SCD asset or two that are merged window by window; with jobs, checks and two
    sensors that run the whole.
    """

    name: str = Field(description="Names assets, jobs, lake folder and, by default, the slot.")
    publication: str = Field(description="The publication to capture; it has to exist.")
    tables: list[TableModel] = Field(description="The publication's tables.")
    slot: str = Field(default="", description="Replication slot; default: pgcdc_<name>.")
    adopt_slot: bool = Field(
        default=CdcCapture.adopt_slot,
        description="Take over a slot that something else has read before.",
    )
    dsn_env: str = Field(
        default=home.DSN_VARIABLE,
        description="Environment variable that holds the source's libpq URI.",
    )
    lake: str | None = Field(
        default=None, description="Folder or URI; default: PGCDC_LAKE, else .pgcdc/lake."
    )
    storage_options: dict[str, str] = Field(
        default={}, description="Options for the object store; write secrets as {{ env.NAME }}."
    )
    spark_remote: str | None = Field(
        default=None, description="Spark Connect address; default: PGCDC_SPARK_REMOTE."
    )
    spark_config: dict[str, str] = Field(default={}, description="Spark settings.")
    windows: WindowModel = Field(default=WindowModel(), description="Opening of windows.")
    stream: StreamModel = Field(default=StreamModel(), description="The replication stream.")
    retention: RetentionModel = Field(
        default=RetentionModel(), description="What is kept for how long."
    )
    checks: CheckModel = Field(default=CheckModel(), description="When checks run.")
    merge_parallelism: int = Field(default=2, description="Tables merged side by side.")
    merge_step: StepModel = Field(
        default=StepModel(), description="How much one commit of a merge folds at most."
    )
    verify_wait_seconds: float = Field(
        default=CdcCapture.verify_wait_seconds,
        description="How long the check equals_source waits for the capture.",
    )
    is_sample: bool = Field(
        default=False,
        description="Leave this capture out once PGCDC_DSN is set and the folder has another one.",
    )

    @property
    def translator(self) -> PgcdcTranslator:
        """Describes the assets; a subclass returns its own."""
        return PgcdcTranslator()

    def capture(self) -> CdcCapture:
        """Return the settings that the YAML declares."""
        return CdcCapture(
            name=self.name,
            publication=self.publication,
            slot=self.slot,
            tables=tuple(table.table() for table in self.tables),
            windows=WindowPolicy(**self.windows.model_dump()),
            stream=StreamPolicy(**self.stream.model_dump()),
            retention=RetentionPolicy(**self.retention.model_dump()),
            checks=CheckPolicy(**self.checks.model_dump()),
            merge_parallelism=self.merge_parallelism,
            merge_step=StepLimit(**self.merge_step.model_dump()),
            verify_wait_seconds=self.verify_wait_seconds,
            adopt_slot=self.adopt_slot,
        )

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Build the capture's definitions.

        Raises:
            ConfigurationError: a setting is wrong; the error names the file.
        """
        if self.is_sample and _is_replaced(context):
            return dg.Definitions()
        try:
            capture = self.capture()
        except ConfigurationError as error:
            raise ConfigurationError(reason=f"{context.path}: {error}") from error
        return build_cdc_definitions(
            capture,
            postgres=PostgresResource(capture=self.name, dsn_env=self.dsn_env),
            lake=LakeResource(uri=self.lake, storage_options=self.storage_options),
            spark=SparkResource(remote=self.spark_remote, spark_config=self.spark_config),
            translator=self.translator,
        )


def _is_replaced(context: dg.ComponentLoadContext) -> bool:
    """Whether a capture is declared beside the sample, for a database of the user's own."""
    if not os.environ.get(home.DSN_VARIABLE, "").strip():
        return False
    path = Path(context.path)
    own = path.parent if path.is_file() else path
    folders = [own.parent, *home.defs_folders()]
    return any(file.parent != own for folder in folders for file in folder.glob("*/defs.yaml"))
