"""Names of a capture's jobs, sensors, resources and pools."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import dagster as dg

from pgcdc_assets.orchestration.feature_warnings import ChecksDefinition
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets.table_name import output_name


@dataclass(frozen=True)
class PooledStep:
    """A step of a capture that one run at a time executes.

    Attributes:
        job: the job that the sensors request. Other jobs may have the step too.
        step: the key of the step.
        pool: the pool of the step.
    """

    job: str
    step: str
    pool: str


@dataclass(frozen=True)
class Names:
    """The names of one capture's parts in Dagster.

    Dagster has one namespace for the jobs and steps of a code location, so no name of a step ends
    like the name of a job. The step `shop_source_checks` of capture `shop` would have the name of
    the job of capture `shop_source`.
    """

    name: str

    @classmethod
    def of(cls, capture: CdcCapture) -> Names:
        """Return the names of a capture."""
        return cls(capture.name)

    @property
    def capture_job(self) -> str:
        """Lands windows."""
        return f"{self.name}_capture"

    @property
    def snapshot_job(self) -> str:
        """Copies tables."""
        return f"{self.name}_snapshot"

    @property
    def merge_job(self) -> str:
        """Merges windows."""
        return f"{self.name}_merge"

    @property
    def check_job(self) -> str:
        """Job: runs the asset checks that no other job runs; its schedule has the same name."""
        return f"{self.name}_checks"

    @property
    def rebuild_job(self) -> str:
        """Job: builds SCD tables from the raw zone."""
        return f"{self.name}_rebuild"

    @property
    def maintenance_job(self) -> str:
        """Job: deletes expired data and compacts tables; its schedule has the same name."""
        return f"{self.name}_upkeep"

    @property
    def messages_job(self) -> str:
        """Job: appends logical messages to their table."""
        return f"{self.name}_messages"

    @property
    def messages_sensor(self) -> str:
        """Sensor: requests appends of logical messages."""
        return f"{self.name}_messages"

    @property
    def messages_step(self) -> str:
        """Step: appends logical messages to their table."""
        return f"{self.name}_append_message_rows"

    @property
    def check_source_step(self) -> str:
        """Step: checks the source."""
        return f"{self.name}_check_source"

    @property
    def check_tables_step(self) -> str:
        """Step: checks whole SCD tables."""
        return f"{self.name}_check_tables"

    @property
    def messages_pool(self) -> str:
        """Pool: one run that appends logical messages."""
        return f"pgcdc/{self.name}/messages"

    @property
    def land_step(self) -> str:
        """Step: lands windows, in every job."""
        return f"{self.name}_land_windows"

    @property
    def copy_step(self) -> str:
        """Step: takes snapshots of tables."""
        return f"{self.name}_copy_tables"

    @property
    def merge_step(self) -> str:
        """Step: merges windows."""
        return f"{self.name}_merge_tables"

    @property
    def lag_sensor(self) -> str:
        """Opens windows."""
        return f"{self.name}_lag"

    @property
    def merge_sensor(self) -> str:
        """Requests merges."""
        return f"{self.name}_merges"

    @property
    def postgres(self) -> str:
        """Resource: the source database."""
        return f"{self.name}_postgres"

    @property
    def lake(self) -> str:
        """Resource: the lake."""
        return f"{self.name}_lake"

    @property
    def spark(self) -> str:
        """Resource: the Spark session."""
        return f"{self.name}_spark"

    @property
    def slot_pool(self) -> str:
        """Pool: one reader of the slot."""
        return f"pgcdc/{self.name}/slot"

    @property
    def snapshot_pool(self) -> str:
        """Pool: one snapshot run, beside captures and merges."""
        return f"pgcdc/{self.name}/snapshot"

    @property
    def maintenance_pool(self) -> str:
        """Pool: one maintenance run, beside captures and merges."""
        return f"pgcdc/{self.name}/upkeep"

    @property
    def merge_pool(self) -> str:
        """Pool: one run that writes SCD tables."""
        return f"pgcdc/{self.name}/tables"

    @property
    def capture_work(self) -> PooledStep:
        """Landing windows."""
        return PooledStep(self.capture_job, self.land_step, self.slot_pool)

    @property
    def snapshot_work(self) -> PooledStep:
        """Taking snapshots of tables."""
        return PooledStep(self.snapshot_job, self.copy_step, self.snapshot_pool)

    @property
    def merge_work(self) -> PooledStep:
        """Merging windows."""
        return PooledStep(self.merge_job, self.merge_step, self.merge_pool)

    @property
    def messages_work(self) -> PooledStep:
        """Appending logical messages."""
        return PooledStep(self.messages_job, self.messages_step, self.messages_pool)

    @property
    def pools(self) -> frozenset[str]:
        """The pools of all steps."""
        return frozenset(
            {
                self.slot_pool,
                self.snapshot_pool,
                self.merge_pool,
                self.messages_pool,
                self.maintenance_pool,
            }
        )


@dataclass(frozen=True)
class StepKeys:
    """Temporary keys of a step's assets, which are replaced after the definition of the step.

    Dagster's decorators derive names of inputs and outputs from asset keys, and replace characters:
    `a-b` and `a_b` would have the same name.

    Attributes:
        checks: names of the checks of the step's assets.
    """

    capture: str
    checks: Iterable[str] = ()
    own: dict[dg.AssetKey, dg.AssetKey] = field(default_factory=dict)

    def output(self, layer: str, table: CdcTable) -> str:
        """Return the name of the output of a table's asset."""
        names = (self.capture, layer, table.schema, table.table)
        return output_name(names, tuple(self.checks))

    def key(self, layer: str, table: CdcTable, own: dg.AssetKey) -> dg.AssetKey:
        """Return the temporary key of a table's asset."""
        key = dg.AssetKey([self.output(layer, table)])
        self.own[key] = own
        return key

    def sources(self, own: Mapping[CdcTable, dg.AssetKey]) -> list[dg.AssetKey]:
        """Return the temporary keys of the source tables."""
        return [self.key("source", table, key) for table, key in own.items()]

    def restore(self, definition: dg.AssetsDefinition) -> dg.AssetsDefinition:
        """Replace the temporary keys by the keys of assets, checks and dependencies."""
        restored = definition.with_attributes(asset_key_replacements=self.own)
        if isinstance(definition, dg.AssetChecksDefinition):
            return ChecksDefinition(**restored.get_attributes_dict())
        return restored
