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
from typing import Literal

import dagster as dg
from dagster.components.resolved.base import Resolvable
from pydantic import Field

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.orchestration.build import build_cdc_definitions
from pgcdc_assets.orchestration.component_models import (
    CatalogModel,
    CheckModel,
    HeartbeatModel,
    MessageModel,
    RetentionModel,
    SnapshotModel,
    StepModel,
)
from pgcdc_assets.orchestration.component_storage import Options, StorageModel
from pgcdc_assets.orchestration.component_tables import AllTablesModel, TableModel
from pgcdc_assets.orchestration.component_texts import Text
from pgcdc_assets.orchestration.project import home
from pgcdc_assets.orchestration.resources import LakeResource, PostgresResource, SparkResource
from pgcdc_assets.orchestration.translator import PgcdcTranslator
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets.settings.policies import (
    CheckPolicy,
    HeartbeatPolicy,
    RetentionPolicy,
    SnapshotPolicy,
    StepLimit,
    StreamPolicy,
    WindowPolicy,
)
from pgcdc_assets.settings.selection import TableSelection
from pgcdc_assets.settings.storage import check_delta_options, check_lake_uri


class WindowModel(dg.Model, Resolvable):
    """When a window is opened, and how large a window may be."""

    max_bytes: int = Field(
        default=WindowPolicy.max_bytes, description="Maximum size of a window, in bytes of WAL."
    )
    min_bytes: int = Field(
        default=WindowPolicy.min_bytes,
        description="Bytes of waiting WAL that open a window at once.",
    )
    max_age_seconds: float = Field(
        default=WindowPolicy.max_age_seconds,
        description="Waiting WAL of any size opens a window this long after the last one landed; "
        "in a run that continues, this long after the last one was opened.",
    )
    max_empty_seconds: float = Field(
        default=WindowPolicy.max_empty_seconds,
        description="While only other tables or databases of the server change, a running capture "
        "opens a window this long after it opened the last one, so that the server can remove WAL. "
        "A change opens a window as usual. 0: such WAL opens windows like changes.",
    )
    retry_seconds: float = Field(
        default=WindowPolicy.retry_seconds,
        description="Pause before a failed window is retried; doubled at each failure.",
    )
    max_retry_seconds: float = Field(
        default=WindowPolicy.max_retry_seconds,
        description="The longest pause between two retries.",
    )
    run_seconds: float = Field(
        default=WindowPolicy.run_seconds,
        description="How long a run that a sensor started continues with further windows while "
        "changes arrive; 0: the run ends after the requested windows.",
    )
    keep: int = Field(
        default=WindowPolicy.keep,
        description="Maximum number of partition keys. Older keys of windows that are merged into "
        "every table are deleted.",
    )


class StreamModel(dg.Model, Resolvable):
    """Times and sizes of the replication stream."""

    batch_bytes: int = Field(
        default=StreamPolicy.batch_bytes, description="Bytes that are decoded together."
    )
    status_seconds: float = Field(
        default=StreamPolicy.status_seconds,
        description="Maximum time between two status packets to the server.",
    )
    silence_seconds: float = Field(
        default=StreamPolicy.silence_seconds,
        description="A connection that sends nothing for this long, despite a request for a reply, "
        "is closed.",
    )
    total_seconds: float | None = Field(
        default=None,
        description="A capture that takes longer is ended and retried. If its write to the lake "
        "hangs, the capture abandons the write after ten more seconds. Unset: no limit.",
    )
    slot_wait_seconds: float = Field(
        default=StreamPolicy.slot_wait_seconds,
        description="How long a capture waits for the walsender of a dead run, before it ends the "
        "walsender.",
    )
    resume_seconds: float = Field(
        default=StreamPolicy.resume_seconds,
        description="A run that lost its connection resumes from the last landed window. It fails "
        "after this time without a connection during one window. 0: it fails at once.",
    )
    resume_pause_seconds: float = Field(
        default=StreamPolicy.resume_pause_seconds,
        description="The longest pause between two attempts to resume. The first pause is 0.1 s at "
        "most; the pauses double, each shortened at random by up to a half.",
    )
    report_seconds: float = Field(
        default=StreamPolicy.report_seconds,
        description="Interval of the figures about a running capture, in the run's log and as "
        "observations of the raw asset.",
    )
    streaming: bool | Literal["off", "on", "parallel"] = Field(
        default="off",
        description="When the server sends a transaction that exceeds its "
        "`logical_decoding_work_mem`. `off`: at the commit. `on`: while it runs, and the rows wait "
        "on the local disk for the commit. `parallel`: as `on`, by the protocol of Postgres 16, "
        "which is not faster.",
    )
    two_phase: bool = Field(
        default=StreamPolicy.two_phase,
        description="The server sends a prepared transaction at PREPARE TRANSACTION, and the rows "
        "wait in the lake for COMMIT PREPARED. Requires Postgres 15. The slot keeps this mode when "
        "the setting is removed.",
    )
    origin: Literal["any", "none"] = Field(
        default="any",
        description="`none`: changes that were replicated into the source from another server are "
        "not captured (Postgres 16).",
    )
    malformed_folder: str | None = Field(
        default=None,
        description="A folder for the messages of a batch that cannot be decoded, for a report "
        "about the problem. The file holds values of rows. Unset: no file is written.",
    )


class PostgresCdcComponent(dg.Component, dg.Model, Resolvable):
    """A component that captures a Postgres publication and maintains SCD tables in the lake.

    For a capture named `shop` the component defines one external asset for each source table,
    `shop/raw` with one partition for each window of WAL, `shop/snapshot` with one partition for
    each table, one or two SCD assets for each table, jobs, checks and sensors.
    """

    name: str = Field(
        description="The capture's name: a part of its asset keys, job names, lake folder and, by "
        "default, slot."
    )
    publication: Text = Field(description="The publication to capture; it must exist.")
    tables: list[TableModel] | Literal["all"] = Field(
        description="The tables to keep, see below; or `all`: the tables of the publication, "
        "including tables that are added to it later."
    )
    all_tables: AllTablesModel | None = Field(
        default=None, description="With `tables: all`: which tables, and how; see below."
    )
    slot: Text = Field(
        default="",
        description="The replication slot. The first snapshot creates it if it is missing. Unset: "
        "`pgcdc_<name>`.",
    )
    failover: bool = Field(
        default=CdcCapture.failover,
        description="Standbys may keep a copy of the slot, so that a promoted standby continues "
        "(Postgres 17). An existing slot gets the option when its next stream starts.",
    )
    adopt_slot: bool = Field(
        default=CdcCapture.adopt_slot,
        description="Take over a slot that another consumer has read. `pgcdc sync --name NAME "
        "--adopt-slot` does so once.",
    )
    dsn_env: str = Field(
        default=home.DSN_VARIABLE,
        description="The environment variable with this capture's libpq URI.",
    )
    primary_dsn_env: str | None = Field(
        default=None,
        description="If the source is a standby: the environment variable with the libpq URI of "
        "its primary, which helps the creation of slots.",
    )
    lake: str | None = Field(
        default=None,
        description="Folder or object-store URI. Unset: `PGCDC_LAKE`, else `.pgcdc/lake`.",
    )
    storage: StorageModel = Field(
        default=StorageModel(), description="The settings of an S3 store, see below."
    )
    storage_options: Options = Field(
        default={},
        description="Further options of delta-rs for the object store, such as `timeout`; for S3, "
        "no settings of `storage`. Dagster shows them: set credentials as environment variables "
        "instead.",
    )
    spark_remote: str | None = Field(
        default=None,
        description="Spark Connect address, or `local`. Unset: `PGCDC_SPARK_REMOTE`.",
    )
    spark_config: Options = Field(
        default={},
        description="Spark settings over the defaults; `spark.jars.packages` adds to Delta's. A "
        "capture with such settings does not use the server of `pgcdc spark start`.",
    )
    windows: WindowModel = Field(
        default=WindowModel(), description="When a window is opened, and how large it may be."
    )
    stream: StreamModel = Field(
        default=StreamModel(), description="Times and sizes of the replication stream."
    )
    heartbeat: HeartbeatModel | None = Field(
        default=None,
        description="A running capture writes to its source at an interval; see below. Unset: it "
        "writes nothing.",
    )
    messages: MessageModel | None = Field(
        default=None,
        description="Which logical messages are captured; see below. Unset: all transactional "
        "messages, without a table of their own.",
    )
    snapshot: SnapshotModel = Field(
        default=SnapshotModel(), description="How snapshots of tables are taken."
    )
    retention: RetentionModel = Field(
        default=RetentionModel(), description="How long data is kept."
    )
    checks: CheckModel = Field(default=CheckModel(), description="When the checks run.")
    merge_parallelism: int = Field(
        default=CdcCapture.merge_parallelism,
        description="How many tables Spark merges in parallel, and how many small tables are "
        "written in parallel (in an object store at least 8).",
    )
    merge_step: StepModel = Field(
        default=StepModel(), description="The maximum that one commit of a merge folds."
    )
    verify_wait_seconds: float = Field(
        default=CdcCapture.verify_wait_seconds,
        description="How long the check `equals_source` waits for the capture of its LSN.",
    )
    on_schema_change: str = Field(
        default=CdcCapture.on_schema_change,
        description="What happens after a change of a table's definition. `follow`: the SCD tables "
        "follow; a change that the stream cannot replay causes an automatic re-snapshot. "
        "`ask`: such a change stops the table until a person takes a new snapshot. `stop`: every "
        "change stops the table.",
    )
    on_poisoned_row: str = Field(
        default=CdcCapture.on_poisoned_row,
        description="What happens to a table with a row that cannot be decoded. The row is parked "
        "in the raw zone, and the merge of the table ends before the row. `rescue`: an automatic "
        "re-snapshot follows. `stop`: a person takes the new snapshot.",
    )
    on_detached_partition: str = Field(
        default=CdcCapture.on_detached_partition,
        description="What happens to the rows of a partition that the source detaches or drops, of "
        "a table that is published as its root. `delete`: a re-snapshot of the root removes them. "
        "`keep`: they stay, see below.",
    )
    catalog_poll_seconds: float = Field(
        default=CdcCapture.catalog_poll_seconds,
        description="How often the lag sensor polls the catalog for schema changes that no row "
        "announces.",
    )
    catalog: CatalogModel | None = Field(
        default=None,
        description="The tables have names in a catalog of Spark; see below.",
    )
    is_sample: bool = Field(
        default=False,
        description="Omit this capture if `PGCDC_DSN` is set and another capture is declared.",
    )

    @property
    def translator(self) -> PgcdcTranslator:
        """Return the translator of the assets. A subclass may return another translator."""
        return PgcdcTranslator()

    def capture(self) -> CdcCapture:
        """Return the capture that the YAML file declares."""
        tables, selection = self._tables()
        return CdcCapture(
            name=self.name,
            publication=self.publication,
            slot=self.slot,
            failover=self.failover,
            tables=tables,
            selection=selection,
            windows=WindowPolicy(**self.windows.model_dump()),
            stream=StreamPolicy(**self.stream.model_dump()),
            heartbeat=(
                None if self.heartbeat is None else HeartbeatPolicy(**self.heartbeat.model_dump())
            ),
            messages=None if self.messages is None else self.messages.policy(),
            snapshot=SnapshotPolicy(**self.snapshot.model_dump()),
            retention=RetentionPolicy(**self.retention.model_dump()),
            checks=CheckPolicy(**self.checks.model_dump()),
            merge_parallelism=self.merge_parallelism,
            merge_step=StepLimit(**self.merge_step.model_dump()),
            verify_wait_seconds=self.verify_wait_seconds,
            adopt_slot=self.adopt_slot,
            on_schema_change=self.on_schema_change,
            on_poisoned_row=self.on_poisoned_row,
            on_detached_partition=self.on_detached_partition,
            catalog_poll_seconds=self.catalog_poll_seconds,
            catalog=None if self.catalog is None else self.catalog.policy(),
        )

    def _tables(self) -> tuple[tuple[CdcTable, ...], TableSelection | None]:
        if isinstance(self.tables, str):
            wanted = self.all_tables or AllTablesModel()
            return tuple(table.table() for table in wanted.named), wanted.selection()
        if self.all_tables is not None:
            raise ConfigurationError(
                reason="all_tables has an effect with `tables: all` only", setting="all_tables"
            )
        return tuple(table.table() for table in self.tables), None

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Build the capture's definitions.

        Raises:
            ConfigurationError: a setting is wrong; the error names the file.
        """
        if self.is_sample and _is_replaced(context):
            return dg.Definitions()
        try:
            if self.lake is not None:
                check_lake_uri(self.lake, "lake")
                check_delta_options(self.lake, self.storage_options)
            capture = self.capture()
            postgres = PostgresResource(
                capture=self.name, dsn_env=self.dsn_env, primary_dsn_env=self.primary_dsn_env
            )
            lake = LakeResource(
                uri=self.lake,
                storage=self.storage.texts(),
                storage_options=self.storage_options,
            )
        except ConfigurationError as error:
            raise ConfigurationError(reason=f"{context.path}: {error}") from error
        return build_cdc_definitions(
            capture,
            postgres=postgres,
            lake=lake,
            spark=SparkResource(remote=self.spark_remote, spark_config=self.spark_config),
            translator=self.translator,
        )


def _is_replaced(context: dg.ComponentLoadContext) -> bool:
    """Return whether a capture of the user's own database is declared beside the sample."""
    if not os.environ.get(home.DSN_VARIABLE, "").strip():
        return False
    path = Path(context.path)
    own = path.parent if path.is_file() else path
    folders = [own.parent, *home.defs_folders()]
    return any(file.parent != own for file in home.defs_files(folders))
