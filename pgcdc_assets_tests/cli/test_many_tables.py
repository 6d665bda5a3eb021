"""`pgcdc sync` and `pgcdc verify` of a publication with hundreds of tables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pgcdc_assets_tests.support.database import Database

TABLES = 500


@pytest.mark.postgres
@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_five_hundred_tables_are_synced_and_equal_their_source(
    database: Database, tmp_path: Path
) -> None:
    """The project file names no table, and its sessions have no setting for many tables."""
    attributes = {
        "name": "wide",
        "publication": "pub",
        "slot": f"s_{database.name}",
        "tables": "all",
    }
    document = {"type": "pgcdc_assets.PostgresCdcComponent", "attributes": attributes}
    for folder in ("defs/wide", "dagster"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "defs" / "wide" / "defs.yaml").write_text(yaml.safe_dump(document))
    environment = {
        **os.environ,
        "PGCDC_DSN": database.conninfo,
        "PGCDC_STATE": str(tmp_path / "state"),
        "PGCDC_LAKE": str(tmp_path / "lake"),
        "DAGSTER_HOME": str(tmp_path / "dagster"),
    }

    def pgcdc(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "pgcdc_assets.cli", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    database.execute("create publication pub for all tables")
    for number in range(TABLES):
        database.execute(f"create table t{number} (id int primary key, v text)")
        database.execute(f"insert into t{number} select n, 'row' from generate_series(1, 3) n")
    pgcdc("sync")
    assert f"{TABLES} tables" in pgcdc("verify")
    for number in range(0, TABLES, 100):
        database.execute(f"update t{number} set v = 'new' where id = 1")
        database.execute(f"delete from t{number + 1} where id = 2")
        database.execute(f"insert into t{number + 2} values (4, 'more')")
    pgcdc("sync")
    assert f"{TABLES} tables" in pgcdc("verify")
