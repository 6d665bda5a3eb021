"""Dagster's definitions and instance of order tables, whose raw zone was landed without a Postgres.

Sensors are evaluated and runs are executed in this process, as `pgcdc sync` does. The instance is
that of a project: SQLite, with the package's `dagster.yaml`, in memory if possible.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import dagster as dg
from dagster import DagsterEventType, SensorDefinition
from dagster._core.definitions.sensor_definition import SensorExecutionData

from benchmarks.scale import memory_folder
from pgcdc_assets import CdcCapture, build_cdc_definitions
from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.orchestration.jobs.requested_job import requested_job
from pgcdc_assets.orchestration.names import Names
from pgcdc_assets.orchestration.project.home import CONFIG
from pgcdc_assets.orchestration.resources import LakeResource, SparkResource
from pgcdc_assets.raw.lake import Lake


@dataclass(frozen=True)
class OrdersLocation:
    """The merge sensor and the merge job of a capture."""

    capture: CdcCapture
    repository: dg.RepositoryDefinition
    instance: dg.DagsterInstance

    def tick(self) -> SensorExecutionData:
        """Evaluate the merge sensor."""
        sensor = self._sensor
        known = self.repository.get_top_level_resources()
        with dg.build_sensor_context(
            instance=self.instance,
            instance_ref=self.instance.get_ref(),
            repository_def=self.repository,
            sensor_name=sensor.name,
            resources={key: known[key] for key in sensor.required_resource_keys},
        ) as context:
            return sensor.evaluate_tick(context)

    def add_windows(self, windows: Sequence[LsnWindow]) -> None:
        """Add the partition keys of landed windows, as the lag sensor does."""
        keys = [window.key for window in windows]
        self.instance.add_dynamic_partitions(self.capture.windows_name, keys)

    def merge(self) -> str:
        """Execute the run that the merge sensor requests, and return the id of the run."""
        (request,) = self.tick().run_requests or []
        job = requested_job(self.repository, Names.of(self.capture).merge_job, request)
        result = job.execute_in_process(
            run_config={"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}},
            instance=self.instance,
            tags=dict(request.tags),
        )
        return result.run_id

    def count_events(self, run_id: str, kind: DagsterEventType) -> int:
        """Return the number of a run's events of one type in Dagster's storage."""
        return len(self.instance.all_logs(run_id, of_type=kind))

    @property
    def _sensor(self) -> SensorDefinition:
        return self.repository.get_sensor_def(Names.of(self.capture).merge_sensor)


@contextmanager
def orders_location(capture: CdcCapture, lake: Lake) -> Iterator[OrdersLocation]:
    """Open an instance in a new folder for the block."""
    definitions = build_cdc_definitions(
        capture, lake=LakeResource(uri=lake.uri), spark=SparkResource(remote="local")
    )
    with memory_folder("dagster") as home:
        shutil.copyfile(CONFIG, home / "dagster.yaml")
        with dg.DagsterInstance.from_config(str(home)) as instance:
            yield OrdersLocation(capture, definitions.get_repository_def(), instance)
