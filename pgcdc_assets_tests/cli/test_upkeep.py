"""`pgcdc upkeep` on a capture of a real database."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pgcdc_assets.cli import main
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.tables.state import table_path
from pgcdc_assets_tests.support.database import NOWHERE, Database
from pgcdc_assets_tests.support.orchestration.location import Locations

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]

MODULE = """
from dagster import Definitions
from pgcdc_assets import CdcCapture, CdcTable, build_cdc_definitions

defs = Definitions.merge(*(
    build_cdc_definitions(
        CdcCapture(name, "pub", (CdcTable("public", "t"),), slot="{slot}" + name)
    )
    for name in ("first", "second")
))
"""


def _unsaved(lake: Lake, name: str) -> int:
    """Count the log entries of a capture that no upkeep has saved."""
    changes = RawZone(lake, name).changes
    table = changes.table.load()
    assert table is not None
    return changes.window_index.unsaved_entries(table)


@pytest.mark.sampled
def test_upkeep_needs_no_source_and_a_failed_capture_does_not_stop_the_next(
    database: Database,
    locations: Locations,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    database.execute("create table t (id int primary key, v text); insert into t values (1, 'a')")
    database.execute("create publication pub for table t")
    module = locations.write(database, MODULE.format(slot=f"s_{database.name}"))
    lake = Lake(str(tmp_path / "lake"))
    assert main(["sync", "-m", module]) == 0
    # The message of the new slot is no change of a table.
    summary = r"^first: captured and merged through \S+: 0 changes in 1 window, 1 merge \("
    assert re.search(summary, capsys.readouterr().out, re.MULTILINE)
    assert _unsaved(lake, "first") > 0 < _unsaved(lake, "second")
    monkeypatch.setenv("PGCDC_DSN", NOWHERE)

    # Two at once wait for each other.
    command = [sys.executable, "-m", "pgcdc_assets.cli", "upkeep", "-m", module, "--name", "second"]
    other = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    capsys.readouterr()
    assert main(["upkeep", "-m", module, "--name", "second"]) == 0
    out, err = other.communicate(timeout=120)
    assert other.returncode == 0, err
    said = [line.partition(" ")[2] for line in err.splitlines()]
    assert all(line.startswith("Waiting for pool pgcdc/second/upkeep, which is") for line in said)
    for printed in (out, capsys.readouterr().out):
        assert printed.startswith("second: expired data is deleted and small files are compacted")
    assert _unsaved(lake, "second") == 0 < _unsaved(lake, "first")

    log = Path(table_path(lake, "first", "public", "t", 1)) / "_delta_log"
    for entry in log.iterdir():
        entry.write_text("{")
    assert main(["upkeep", "-m", module]) == 4
    ended = capsys.readouterr()
    assert ended.err.startswith("pgcdc: first: Not maintained: public.t. ")
    assert ended.err.endswith("pgcdc rebuild first\n")
    assert ended.out.startswith("second: ")
    assert _unsaved(lake, "first") == 0
