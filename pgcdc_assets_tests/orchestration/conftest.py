"""A Dagster instance and a capture of a real database for each test."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from dagster import DagsterEvent, DagsterEventType

from pgcdc_assets.orchestration.build import build_cdc_definitions
from pgcdc_assets.orchestration.jobs.requested_job import requested_job
from pgcdc_assets.orchestration.jobs.sync import sync_capture
from pgcdc_assets.orchestration.jobs.sync_report import SyncLimits, SyncReport
from pgcdc_assets.orchestration.project.code_location import CodeLocation, find_captures
from pgcdc_assets.orchestration.project.home import CONFIG
from pgcdc_assets.orchestration.resources import LakeResource, PostgresResource
from pgcdc_assets.orchestration.runs.sync_progress import SyncProgress, sync_progress
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets.settings.policies import WindowPolicy
from pgcdc_assets.settings.selection import TableSelection
from pgcdc_assets.verify import compare_table
from pgcdc_assets_tests.support.database import Database

NAME = "t"
LIMITS = SyncLimits(wait_seconds=20, poll_seconds=0.1)


@dataclass
class Orchestrated:
    """A capture with Dagster: `tick` evaluates a sensor, `execute` runs its requests."""

    database: Database
    lake: Lake
    instance: dg.DagsterInstance
    capture: CdcCapture
    barrier: SyncProgress | None = None
    location: CodeLocation = field(init=False)

    def __post_init__(self) -> None:
        definitions = build_cdc_definitions(
            self.capture,
            postgres=PostgresResource(capture=NAME, conninfo=self.database.conninfo),
            lake=LakeResource(uri=self.lake.uri),
        )
        self.location = CodeLocation(definitions, find_captures(definitions))

    @property
    def zone(self) -> RawZone:
        return RawZone(self.lake, NAME)

    @property
    def raw(self) -> dg.AssetKey:
        return dg.AssetKey([NAME, "raw"])

    def evaluate(self, *checks: dg.AssetCheckKey) -> Sequence[dg.AssetCheckEvaluation]:
        """Run asset checks alone, and return their evaluations."""
        job = dg.define_asset_job("asked", selection=dg.AssetSelection.checks(*checks))
        definitions = dg.Definitions.merge(self.location.definitions, dg.Definitions(jobs=[job]))
        done = definitions.resolve_job_def("asked").execute_in_process(instance=self.instance)
        return done.get_asset_check_evaluations()

    def windows(self) -> list[str]:
        return list(self.instance.get_dynamic_partitions(self.capture.windows_name))

    def land_and_open(self) -> tuple[str, str]:
        """Land a window, open the next one by a tick, and return the keys of both."""
        self.copy()
        self.land()
        self.commit("insert into b values (1, 1)")
        self.tick("lag")
        landed, opened = self.windows()
        return landed, opened

    def commit(self, statement: str) -> None:
        """Execute a statement and flush its commit, because test servers commit asynchronously."""
        self.database.transaction("set local synchronous_commit = on", statement)

    def tick(self, sensor: str, one_shot: bool = False) -> Any:
        """Evaluate the sensor, and apply its partitions and asset events."""
        repository = self.location.repository
        known = repository.get_top_level_resources()
        definition = repository.get_sensor_def(f"{NAME}_{sensor}")
        progress = SyncProgress(NAME) if one_shot else None
        token = sync_progress.set(progress)
        try:
            with dg.build_sensor_context(
                instance=self.instance,
                instance_ref=self.instance.get_ref(),
                repository_def=repository,
                resources={key: known[key] for key in definition.required_resource_keys},
            ) as context:
                data = definition.evaluate_tick(context)
        finally:
            sync_progress.reset(token)
        for event in data.asset_events:
            self.instance.report_runless_asset_event(event)
        for request in data.dynamic_partitions_requests or []:
            if isinstance(request, dg.AddDynamicPartitionsRequest):
                self.instance.add_dynamic_partitions(
                    request.partitions_def_name, list(request.partition_keys)
                )
            else:
                for key in request.partition_keys:
                    self.instance.delete_dynamic_partition(request.partitions_def_name, key)
        return data

    def execute(self, request: dg.RunRequest, job: str) -> dg.ExecuteInProcessResult:
        wanted = requested_job(self.location.repository, f"{NAME}_{job}", request)
        return wanted.execute_in_process(
            instance=self.instance, tags=dict(request.tags), raise_on_error=False
        )

    def create_run(
        self, job: str, tags: Mapping[str, str], repeats: str | None = None
    ) -> dg.DagsterRun:
        """Record a run of a job in the instance.

        Args:
            repeats: the id of the run that this run repeats.
        """
        definition = self.location.repository.get_job(f"{NAME}_{job}")
        return self.instance.create_run_for_job(
            definition,
            tags={**definition.run_tags, **tags},
            parent_run_id=repeats,
            root_run_id=repeats,
        )

    def start_run(
        self, job: str, tags: Mapping[str, str], repeats: str | None = None
    ) -> dg.DagsterRun:
        """Create a run in the state that a killed process leaves."""
        run = self.create_run(job, tags, repeats)
        event = DagsterEvent(DagsterEventType.RUN_START.value, job_name=run.job_name)
        self.instance.report_dagster_event(event, run.run_id)
        return run

    def equals_source(self, table: str) -> bool:
        """Return whether an SCD1 table equals its source."""
        settings = self.database.settings()
        return compare_table(settings, self.zone, "pub", "public", table).is_equal

    def sync(
        self, say: Callable[[str], None] = lambda line: None, limits: SyncLimits = LIMITS
    ) -> SyncReport:
        """Capture and merge all committed changes, as `pgcdc sync` does."""
        loaded = self.location.captures[NAME]
        return sync_capture(self.instance, self.location, loaded, say=say, limits=limits)

    def copy(self) -> None:
        """Execute the lag sensor's request for the first snapshots."""
        (request,) = self.tick("lag").run_requests
        assert self.execute(request, "snapshot").success

    def land(self) -> dg.ExecuteInProcessResult:
        """Open a window over all earlier commits, and land the window."""
        (request,) = self.tick("lag", one_shot=True).run_requests
        result = self.execute(request, "capture")
        assert result.success
        return result


def followed_capture(database: Database, windows: WindowPolicy, **options: Any) -> CdcCapture:
    """Return a capture of all tables of publication `pub`, which polls the catalog at each tick."""
    return CdcCapture(
        NAME,
        "pub",
        (),
        slot=f"s_{database.name}",
        windows=windows,
        catalog_poll_seconds=0,
        selection=TableSelection(),
        **options,
    )


@pytest.fixture(scope="session")
def fresh_home(tmp_path_factory: pytest.TempPathFactory, quick_dagster_storage: None) -> Path:
    """Create an empty instance to copy, because Dagster needs a second to create each instance."""
    home = tmp_path_factory.mktemp("dagster")
    (home / "dagster.yaml").write_text(CONFIG.read_text())
    with dg.DagsterInstance.from_config(str(home)) as instance:
        instance.get_runs(limit=1)
        instance.get_dynamic_partitions("none")
        instance.all_instigator_state()
    return home


@pytest.fixture
def instance(tmp_path: Path, fresh_home: Path) -> Iterator[dg.DagsterInstance]:
    """Open a persistent instance for the test, with the package's dagster.yaml."""
    home = shutil.copytree(fresh_home, tmp_path / "dagster")
    with dg.DagsterInstance.from_config(str(home)) as instance:
        yield instance


@pytest.fixture
def unbuffered(tmp_path: Path, fresh_home: Path) -> Iterator[dg.DagsterInstance]:
    """Open an instance that starts no run whose pool is used."""
    home = shutil.copytree(fresh_home, tmp_path / "unbuffered")
    config = CONFIG.read_text().splitlines(keepends=True)
    kept = [line for line in config if "op_granularity_run_buffer" not in line]
    assert len(kept) == len(config) - 1
    (home / "dagster.yaml").write_text("".join(kept))
    with dg.DagsterInstance.from_config(str(home)) as instance:
        yield instance


@pytest.fixture
def limited(
    tmp_path: Path, fresh_home: Path
) -> Iterator[Callable[[Mapping[str, Any]], dg.DagsterInstance]]:
    """Open an instance with limits of `concurrency.runs`."""
    with ExitStack() as opened:

        def open_with(limits: Mapping[str, Any]) -> dg.DagsterInstance:
            home = shutil.copytree(fresh_home, tmp_path / "limited")
            config = yaml.safe_load(CONFIG.read_text())
            config["concurrency"]["runs"] = dict(limits)
            (home / "dagster.yaml").write_text(yaml.safe_dump(config))
            return opened.enter_context(dg.DagsterInstance.from_config(str(home)))

        yield open_with


@pytest.fixture
def orchestrated(database: Database, lake: Lake, instance: dg.DagsterInstance) -> Orchestrated:
    """Create two tables in a publication, `a` with rows and `b` empty, and their capture."""
    database.execute("create table a (id int primary key, v text)")
    database.execute("create table b (id int primary key, n numeric(10, 2))")
    database.execute("insert into a select n, 'row ' || n from generate_series(1, 10) n")
    database.execute("create publication pub for table a, b")
    return Orchestrated(
        database,
        lake,
        instance,
        CdcCapture(
            NAME,
            "pub",
            (CdcTable("public", "a"), CdcTable("public", "b")),
            slot=f"s_{database.name}",
            # A run ends after its window. The fixture `continuing` has longer runs.
            windows=WindowPolicy(max_age_seconds=0, retry_seconds=0, run_seconds=0),
        ),
    )


@pytest.fixture
def continuing(orchestrated: Orchestrated) -> Orchestrated:
    """Return a capture with snapshots whose runs continue for up to a minute."""
    policy = WindowPolicy(max_age_seconds=0.2, max_empty_seconds=0, retry_seconds=0, run_seconds=60)
    capture = replace(orchestrated.capture, windows=policy)
    made = Orchestrated(orchestrated.database, orchestrated.lake, orchestrated.instance, capture)
    made.copy()
    return made
