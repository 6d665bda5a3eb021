"""The Dagster definitions of one capture, built from its settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import (
    UnresolvedAssetJobDefinition,
)
from dagster._utils.schedules import is_valid_cron_string

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.orchestration.assets.messages import build_messages_asset
from pgcdc_assets.orchestration.assets.raw import build_raw_asset
from pgcdc_assets.orchestration.assets.scd import build_scd_assets
from pgcdc_assets.orchestration.assets.snapshot import build_snapshot_asset
from pgcdc_assets.orchestration.checks.invariants import INVARIANTS
from pgcdc_assets.orchestration.checks.raw import WINDOW_CHECKS, build_source_checks
from pgcdc_assets.orchestration.checks.scd import build_table_checks
from pgcdc_assets.orchestration.feature_warnings import without_feature_warnings
from pgcdc_assets.orchestration.jobs.maintenance import build_maintenance_job
from pgcdc_assets.orchestration.jobs.rebuild import build_rebuild_job
from pgcdc_assets.orchestration.jobs.schedules import build_schedule
from pgcdc_assets.orchestration.names import Names
from pgcdc_assets.orchestration.partitions import SpecificPartitionsPartitionMapping
from pgcdc_assets.orchestration.resources import LakeResource, PostgresResource, SparkResource
from pgcdc_assets.orchestration.runs.executor import run_executor
from pgcdc_assets.orchestration.runs.records import CAPTURE_TAG
from pgcdc_assets.orchestration.sensors.lag import LagSensorAssets, build_lag_sensor
from pgcdc_assets.orchestration.sensors.merge import build_merge_sensor
from pgcdc_assets.orchestration.sensors.messages import build_messages_sensor
from pgcdc_assets.orchestration.settings_metadata import CAPTURE_METADATA, write_capture_settings
from pgcdc_assets.orchestration.table_list import declare_listed_tables
from pgcdc_assets.orchestration.translator import AssetData, Layer, PgcdcTranslator
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets.spark.catalog import qualified_entry_name


@without_feature_warnings()
def build_cdc_definitions(
    capture: CdcCapture,
    *,
    postgres: PostgresResource | None = None,
    lake: LakeResource | None = None,
    spark: SparkResource | None = None,
    translator: PgcdcTranslator | None = None,
    declared_in: Path | None = None,
) -> dg.Definitions:
    """Build the assets, checks, jobs, sensors and resources of a capture.

    The call opens no connection and starts no process. For a capture that follows its publication
    (`selection`), the call reads the list of tables in the lake. Combine several captures with
    `Definitions.merge`.

    Args:
        capture: the settings.
        postgres: the source database. None: the database of `PGCDC_DSN`.
        lake: the lake. None: the lake of `PGCDC_LAKE`.
        spark: the Spark session. None: the default session of `SparkResource`.
        translator: keys and descriptions of the assets.
        declared_in: the file that the UI shows as the code of the assets, for example
            `Path(__file__)`.

    Raises:
        ConfigurationError: a schedule is not a cron expression, or the list of tables cannot be
            read.
    """
    _check_schedules(capture)
    postgres = postgres or PostgresResource(capture=capture.name)
    lake = lake or LakeResource()
    reconstruction: dict[str, str] = {}
    if capture.selection is not None:
        capture, reconstruction = declare_listed_tables(capture, postgres, lake)
    builder = _Builder(capture, translator or PgcdcTranslator(), declared_in)
    spark = spark or SparkResource()
    if capture.catalog is not None and capture.catalog.is_hive:
        spark = spark.with_hive()
    definitions = builder.build(postgres, lake, spark)
    return definitions.with_reconstruction_metadata(reconstruction)


class _MessageDefinitions(NamedTuple):
    """The definitions of the table of logical messages; empty without this table."""

    key: dg.AssetKey | None = None
    assets: Sequence[dg.AssetsDefinition] = ()
    jobs: Sequence[UnresolvedAssetJobDefinition] = ()
    sensors: Sequence[dg.SensorDefinition] = ()


class _Builder:
    def __init__(
        self, capture: CdcCapture, translator: PgcdcTranslator, declared_in: Path | None
    ) -> None:
        self.capture = capture
        self.names = Names.of(capture)
        self.translator = translator
        self.declared_in = declared_in
        self.windows = dg.DynamicPartitionsDefinition(name=capture.windows_name)
        self.tables = dg.StaticPartitionsDefinition(
            [table.partition_key for table in capture.tables]
        )

    def build(
        self, postgres: PostgresResource, lake: LakeResource, spark: SparkResource
    ) -> dg.Definitions:
        sources = {table: self._spec(Layer.SOURCE, table) for table in self.capture.tables}
        raw = self._spec(Layer.RAW)
        raw = raw.merge_attributes(
            metadata={CAPTURE_METADATA: write_capture_settings(self.capture)}
        )
        snapshot = self._spec(Layer.SNAPSHOT)
        scds = {
            (table, scd): self._scd_spec(table, scd, raw.key, snapshot.key)
            for table in self.capture.tables
            for scd in table.scd
        }
        scd_keys = {(t.schema, t.table, scd): spec.key for (t, scd), spec in scds.items()}
        capture_job, snapshot_job, merge_job, check_job = self._jobs(
            raw.key, snapshot.key, list(scd_keys.values())
        )
        messages = self._messages(raw.key)
        maintenance_job, maintenance_schedule = build_maintenance_job(
            self.capture, raw.key, scd_keys, messages.key
        )
        keys = {table: spec.key for table, spec in sources.items()}
        tables = {place: spec.key for place, spec in scds.items()}
        jobs = capture_job, snapshot_job, check_job
        targets = LagSensorAssets(raw.key, snapshot.key, tables, keys, jobs)
        return dg.Definitions(
            assets=[
                *sources.values(),
                build_raw_asset(self.capture, raw, keys, self.windows),
                build_snapshot_asset(self.capture, snapshot, keys, self.tables),
                build_scd_assets(self.capture, scds, keys, self.windows, snapshot.key),
                *messages.assets,
            ],
            asset_checks=[
                build_source_checks(self.capture, raw.key, snapshot.key, tables),
                build_table_checks(self.capture, scd_keys, raw.key),
            ],
            jobs=[
                capture_job,
                snapshot_job,
                merge_job,
                check_job,
                build_rebuild_job(self.capture, scd_keys),
                maintenance_job,
                *messages.jobs,
            ],
            schedules=[maintenance_schedule, *self._check_schedule(check_job)],
            sensors=[
                build_lag_sensor(self.capture, targets),
                build_merge_sensor(self.capture, scd_keys, snapshot.key, merge_job),
                *messages.sensors,
            ],
            resources={
                self.names.postgres: postgres,
                self.names.lake: lake,
                self.names.spark: spark,
            },
            executor=run_executor,
        )

    def _jobs(
        self, raw: dg.AssetKey, snapshot: dg.AssetKey, scds: list[dg.AssetKey]
    ) -> tuple[UnresolvedAssetJobDefinition, ...]:
        with_window = dg.AssetSelection.checks(
            *(dg.AssetCheckKey(raw, check) for check in WINDOW_CHECKS)
        )
        with_merge = dg.AssetSelection.checks(*(dg.AssetCheckKey(key, INVARIANTS) for key in scds))
        jobs = {
            self.names.capture_job: (
                dg.AssetSelection.assets(raw).without_checks() | with_window,
                "Lands one window of WAL in the raw zone.",
            ),
            self.names.snapshot_job: (
                dg.AssetSelection.assets(snapshot).without_checks(),
                "Takes snapshots of tables; the first run creates the slot.",
            ),
            self.names.merge_job: (
                dg.AssetSelection.assets(*scds).without_checks() | with_merge,
                "Merges landed windows into the tables.",
            ),
            self.names.check_job: (
                dg.AssetSelection.checks_for_assets(raw, snapshot, *scds)
                - with_window
                - with_merge,
                "Checks slot, replica identities and whole tables, and compares tables with the "
                "source.",
            ),
        }
        return tuple(
            dg.define_asset_job(
                name,
                selection=selection,
                description=description,
                executor_def=run_executor,
                tags={"pgcdc/capture": self.capture.name},
            )
            for name, (selection, description) in jobs.items()
        )

    def _messages(self, raw: dg.AssetKey) -> _MessageDefinitions:
        """Build the table of logical messages, if the capture has one."""
        if not self.capture.has_message_table:
            return _MessageDefinitions()
        spec = self._spec(Layer.MESSAGES)
        job = dg.define_asset_job(
            self.names.messages_job,
            selection=dg.AssetSelection.assets(spec.key),
            description="Appends landed logical messages to their table.",
            executor_def=run_executor,
            tags={CAPTURE_TAG: self.capture.name},
        )
        return _MessageDefinitions(
            key=spec.key,
            assets=[build_messages_asset(self.capture, spec, raw, self.windows)],
            jobs=[job],
            sensors=[build_messages_sensor(self.capture, spec.key, job)],
        )

    def _check_schedule(self, job: UnresolvedAssetJobDefinition) -> list[dg.ScheduleDefinition]:
        cron = self.capture.checks.schedule
        return [] if cron is None else [build_schedule(self.capture.name, job, cron)]

    def _spec(self, layer: Layer, table: CdcTable | None = None) -> dg.AssetSpec:
        spec = self.translator.get_asset_spec(AssetData(layer, self.capture, table))
        if self.declared_in is None:
            return spec
        references = _references(self.declared_in)
        return spec.merge_attributes(metadata={"dagster/code_references": references})

    def _scd_spec(
        self, table: CdcTable, scd: int, raw: dg.AssetKey, snapshot: dg.AssetKey
    ) -> dg.AssetSpec:
        # Each window depends on the same window of the raw asset, and on the table's snapshot.
        copies = SpecificPartitionsPartitionMapping([table.partition_key])
        spec = self._spec(Layer(f"scd{scd}"), table)
        if self.capture.catalog is not None:
            entry = qualified_entry_name(self.capture.catalog, table.name, scd)
            spec = spec.merge_attributes(metadata={"dagster/table_name": entry})
        return spec.replace_attributes(
            deps=[
                dg.AssetDep(raw, partition_mapping=dg.IdentityPartitionMapping()),
                dg.AssetDep(snapshot, partition_mapping=copies),
            ]
        )


def _check_schedules(capture: CdcCapture) -> None:
    """Raise a ConfigurationError if a schedule is not a cron expression."""
    for setting, cron in (
        ("retention.schedule", capture.retention.schedule),
        ("checks.schedule", capture.checks.schedule),
    ):
        if cron is not None and not is_valid_cron_string(cron):
            raise ConfigurationError(
                reason=f"Capture {capture.name}: {setting} is {cron!r}, but must be a cron "
                "expression such as '47 4 * * *'"
            )


def _references(declared_in: Path) -> dg.CodeReferencesMetadataValue:
    return dg.CodeReferencesMetadataValue(
        code_references=[dg.LocalFileCodeReference(file_path=str(declared_in))]
    )
