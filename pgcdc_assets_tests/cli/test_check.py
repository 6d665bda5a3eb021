"""`pgcdc check` of captures in defs.yaml: an error has its position in the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from pgcdc_assets.cli import main
from pgcdc_assets_tests.support.database import Database

pytestmark = pytest.mark.postgres

DEFS = """type: pgcdc_assets.PostgresCdcComponent
attributes:
  name: mine
  publication: pub
  slot: SLOT
  tables:
    - {name: public.good, scd: [1]}
    - name: public.nowhere
    - name: '"a.b"."Über %"'
      scd: [2]
      key: [id, nope]
"""


def test_tables_and_keys_that_do_not_exist_are_named_with_their_lines(
    project: Path, database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    database.execute('create schema "a.b"')
    for table in ("public.good", '"a.b"."Über %"'):
        database.execute(f"create table {table} (id int primary key)")
    database.execute("create publication pub for all tables")
    folder = project / "defs" / "mine"
    folder.mkdir(parents=True)
    (folder / "defs.yaml").write_text(DEFS.replace("SLOT", f"s_{database.name}"))
    (project / "defs" / "broken.yaml").write_text("{")
    assert main(["check", "--name", "mine"]) == 2
    errors = [line for line in capsys.readouterr().out.splitlines() if "ERROR" in line]
    assert len(errors) == 2, errors
    (table,) = [line for line in errors if "public.nowhere does not exist" in line]
    assert "defs/mine/defs.yaml:8:7: " in table
    (key,) = [line for line in errors if "names nope" in line]
    assert "defs/mine/defs.yaml:11:12: " in key
    assert '"a.b"."Über %"' in key


def test_a_missing_publication_hides_no_other_finding(
    project: Path, database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = project / "defs" / "mine"
    folder.mkdir(parents=True)
    (folder / "defs.yaml").write_text(DEFS.replace("SLOT", f"s_{database.name}"))
    assert main(["check", "--name", "mine"]) == 2
    printed = capsys.readouterr()
    assert "ERROR    Publication pub does not exist" in printed.out
    assert "may replicate" in printed.out
    assert "1 thing is wrong or missing for publication pub: publication." in printed.err
