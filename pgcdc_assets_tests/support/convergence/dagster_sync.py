"""A process that tests kill: `pgcdc sync` of a capture on a given Dagster instance.

The process prints `ready` after its imports, so that a kill at a random time interrupts its work.
"""

from __future__ import annotations

import json
import sys

import dagster as dg

from pgcdc_assets.orchestration.build import build_cdc_definitions
from pgcdc_assets.orchestration.jobs.sync import sync_capture
from pgcdc_assets.orchestration.jobs.sync_report import SyncLimits
from pgcdc_assets.orchestration.project.code_location import CodeLocation, find_captures
from pgcdc_assets.orchestration.resources import LakeResource, PostgresResource
from pgcdc_assets.orchestration.settings_metadata import read_capture_settings


def main() -> None:
    facts = json.loads(sys.argv[1])
    capture = read_capture_settings(dg.MetadataValue.json(facts["capture"]))
    definitions = build_cdc_definitions(
        capture,
        postgres=PostgresResource(capture=capture.name, conninfo=facts["conninfo"]),
        lake=LakeResource(uri=facts["lake"]),
    )
    location = CodeLocation(definitions, find_captures(definitions))
    with dg.DagsterInstance.from_config(facts["home"]) as instance:
        print("ready", flush=True)
        loaded = location.captures[capture.name]
        sync_capture(
            instance,
            location,
            loaded,
            say=lambda line: print(line, flush=True),
            limits=SyncLimits(wait_seconds=120, poll_seconds=0.2),
        )


if __name__ == "__main__":
    main()
