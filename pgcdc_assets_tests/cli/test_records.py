"""Commands whose Dagster instance has records that cannot be read or written."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from pgcdc_assets.cli import main
from pgcdc_assets_tests.support.database import Database

pytestmark = pytest.mark.postgres

_STATUS = ["status", "-m", "pgcdc_assets.definitions"]
_POSTGRES = """storage:
  postgres:
    postgres_url: postgresql://dagster:ses@me@127.0.0.1:1/dagster
"""


def test_records_that_cannot_be_opened_are_a_transient_failure(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = project.parent / "home"
    (home / "history" / "runs.db").mkdir(parents=True)
    assert main(_STATUS) == 3
    error = capsys.readouterr().err
    assert f"The records of the Dagster instance {home} are not available" in error
    assert "unable to open database file" in error


def test_records_that_are_damaged_are_a_wrong_setting(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = project.parent / "home" / "history"
    history.mkdir()
    (history / "runs.db").write_bytes(b"damaged" * 1000)
    assert main(_STATUS) == 2
    assert "cannot be read (file is not a database)" in capsys.readouterr().err


@pytest.mark.sampled
def test_a_database_of_records_that_does_not_answer_is_a_transient_failure(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project.parent / "home" / "dagster.yaml").write_text(_POSTGRES)
    assert main(_STATUS) == 3
    error = capsys.readouterr().err
    assert "are not available (OperationalError)" in error
    assert "me@" not in error


def test_records_of_another_release_of_dagster_name_the_migration(
    project: Path, database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    database.execute("create table t (id int primary key); create publication p for table t")
    assert main(["init", "--name", "mine", "--publication", "p"]) == 0
    status = ["status", "--name", "mine"]
    assert main(status) == 0
    with sqlite3.connect(project.parent / "home" / "history" / "runs" / "index.db") as records:
        records.execute("alter table asset_keys rename to asset_keys_of_another_release")
    assert main(status) == 2
    assert "dagster instance migrate" in capsys.readouterr().err
