"""A process that executes a run as Dagster's launcher does, for tests that interrupt the run."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import dagster as dg

from pgcdc_assets.orchestration.build import build_cdc_definitions
from pgcdc_assets.orchestration.resources import LakeResource, PostgresResource
from pgcdc_assets.orchestration.settings_metadata import (
    read_capture_settings,
    write_capture_settings,
)
from pgcdc_assets.settings import CdcCapture

VARIABLE = "PGCDC_TEST_RUN"


def arguments(
    capture: CdcCapture, conninfo: str, lake: str, job: str, tags: dict[str, str], home: str
) -> dict[str, str]:
    """Return the process's arguments from its environment."""
    declared = write_capture_settings(capture).data
    known = {"conninfo": conninfo, "lake": lake, "job": job, "tags": tags, "home": home}
    return {**os.environ, VARIABLE: json.dumps({"capture": declared, **known})}


def job() -> dg.JobDefinition:
    """Return the job to run."""
    given = _given()
    capture = read_capture_settings(dg.MetadataValue.json(given["capture"]))
    definitions = build_cdc_definitions(
        capture,
        postgres=PostgresResource(capture=capture.name, conninfo=given["conninfo"]),
        lake=LakeResource(uri=given["lake"]),
    )
    return definitions.resolve_job_def(given["job"])


def _given() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(os.environ[VARIABLE])
    return found


def main() -> int:
    from pgcdc_assets_tests.support.orchestration import run_process

    given = _given()
    with dg.DagsterInstance.from_config(given["home"]) as instance:
        result = dg.execute_job(
            dg.reconstructable(run_process.job),
            instance,
            tags=given["tags"],
            raise_on_error=False,
        )
        return 0 if result.success else 1


if __name__ == "__main__":
    sys.exit(main())
