"""`pgcdc init` writes below the current folder, and adds new tables without other changes."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import pytest
import yaml

from pgcdc_assets.cli import main
from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.orchestration.project.code_location import find_captures, load_defs_folders
from pgcdc_assets.orchestration.project.defs_tables import DefsTables
from pgcdc_assets.orchestration.project.home import defs_folders
from pgcdc_assets.settings import CdcTable
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.full_disk import full_disk

ROOT = Path(__file__).resolve().parents[2]
HEAD = "type: pgcdc_assets.PostgresCdcComponent\nattributes:\n  name: mine\n  publication: p\n"
NEW = [CdcTable("public", "new", (1,), ("id",)), CdcTable("a.b", "Über", (1,), ("x y",))]
WORDS = ["name: public.new", "key: [id]", "name: '\"a.b\".Über'", "key: [x y]"]

# Files before two tables are added. `+` marks the place of the added lines.
FORMS = {
    "as init writes it": HEAD + "  tables:\n  - {name: t, scd: [1]}\n+",
    "with comments": HEAD
    + "  # ours\n  tables:  # all of them\n    - name: t  # the first\n      scd: [1]\n+"
    + "      # a remark\n\n  slot: s  # last\n",
    "in block style with a list inside": HEAD
    + "  tables:\n    - key:\n        - id\n      name: t\n    - name: u\n      key:\n"
    + "        - a\n+"
    + "  windows: {keep: 5}\n",
    "with the list on one line": HEAD + "  tables: [{name: t}, {name: 'u'}+]\n  slot: s\n",
    "with a comma at the end": HEAD + "  tables: [\n    {name: t}+,\n  ]\n",
    "with other line ends": (HEAD + "  tables:\n  - {name: t}\n+  slot: s\n").replace("\n", "\r\n"),
    "without a last line end": HEAD + "  tables:\n  - {name: t}+",
    "behind another document": "type: other.Thing\nattributes: {name: x}\n---\n"
    + HEAD
    + "  tables:\n  - {name: t}\n+---\ntype: other.Thing\n",
}


@pytest.mark.postgres
def test_init_names_a_full_disk_and_leaves_no_draft(
    tmp_path: Path,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    database.execute("create table t (id int primary key); create publication p for table t")
    monkeypatch.setenv("PGCDC_DSN", database.conninfo)
    monkeypatch.chdir(tmp_path)
    with full_disk():
        assert main(["init", "--name", "mine", "--publication", "p"]) == 3
    assert "defs.yaml cannot be written (File too large). Free space" in capsys.readouterr().err
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("form", FORMS)
def test_tables_are_added_and_no_other_byte_changes(form: str, tmp_path: Path) -> None:
    head, tail = FORMS[form].split("+")
    path = tmp_path / "defs.yaml"
    path.write_bytes((head + tail).encode())
    path.chmod(0o640)
    listed = DefsTables.read(path, "mine")
    listed.add(NEW)
    text = path.read_bytes().decode()
    assert text.startswith(head)
    assert text.endswith(tail)
    added = text[len(head) : len(text) - len(tail)]
    assert all(added.count(words) == 1 for words in WORDS)
    again = DefsTables.read(path, "mine")
    assert again.names == [*listed.names, *(table.name for table in NEW)]
    rest = {key: value for key, value in again.attributes.items() if key != "tables"}
    assert rest == {key: value for key, value in listed.attributes.items() if key != "tables"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [file.name for file in tmp_path.iterdir()] == ["defs.yaml"]
    if "\r\n" in head:
        assert text.count("\n") == text.count("\r\n")


def test_a_file_in_an_unsupported_form_is_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "defs.yaml"
    text = HEAD + "  tables:\n    - name: >-\n        t\n\n\n"
    path.write_text(text.replace("    - name", "    - &t\n      name") + "    - *t\n")
    before = path.read_bytes()
    try:
        DefsTables.read(path, "mine").add(NEW)
    except ConfigurationError as error:
        assert WORDS[0] in str(error)
        assert path.read_bytes() == before
    else:
        assert DefsTables.read(path, "mine").names[-1] == NEW[-1].name


@pytest.mark.postgres
def test_init_writes_below_the_current_folder_and_the_capture_is_found_there(
    project: Path,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    database.execute("create table t (id int primary key)")
    database.execute("create publication p for table t")
    assert main(["init", "--name", "mine", "--publication", "p"]) == 0
    assert (project / "defs" / "mine" / "defs.yaml").is_file()
    assert set(find_captures(load_defs_folders(defs_folders()))) == {"mine"}
    monkeypatch.delenv("PGCDC_DSN")
    assert set(find_captures(load_defs_folders(defs_folders()))) == {"mine", "shop"}
    assert main(["init", "--name", "mine", "--publication", "p"]) == 2
    assert "--update adds the missing tables, --force" in capsys.readouterr().err
    assert main(["init", "--name", "shop", "--publication", "p", "--force"]) == 2
    assert "shop/defs.yaml exists already" in capsys.readouterr().err


@pytest.mark.postgres
@pytest.mark.parametrize(
    ("folder", "command"),
    [
        (None, "pgcdc sync --name mine"),
        ("./defs", "pgcdc sync --name mine"),
        ("etl", "pgcdc sync -m MODULE --name mine"),
    ],
)
def test_init_prints_a_next_command_that_finds_the_capture(
    project: Path,
    database: Database,
    folder: str | None,
    command: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Commands without -m load ./defs, and no other folder of a user."""
    database.execute("create table t (id int primary key); create publication p for table t")
    given = [] if folder is None else ["--defs", folder]
    assert main(["init", "--name", "mine", "--publication", "p", *given]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.endswith(command)
    found = "mine" in find_captures(load_defs_folders(defs_folders()))
    assert found is ("-m MODULE" not in line) is ("code location" not in line)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a clone")
def test_git_ignores_files_that_init_writes_in_a_clone() -> None:
    command = ["git", "check-ignore", "-q", "defs/mine/defs.yaml"]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0


@pytest.mark.postgres
def test_update_adds_new_tables_and_prints_other_differences(
    project: Path, database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("kept", "gone", "rekeyed"):
        database.execute(f"create table {name} (id int primary key, other int not null unique)")
    database.execute("create publication p for table kept, gone, rekeyed")
    assert main(["init", "--name", "mine", "--publication", "p"]) == 0
    path = project / "defs" / "mine" / "defs.yaml"
    edited = path.read_text().replace("scd: [1]\n", "scd: [1, 2]  # by hand\n", 1)
    assert "by hand" in edited
    path.write_text(edited + "  windows: {keep: 500}  # ours\n")
    before = path.read_text().splitlines()
    capsys.readouterr()

    assert main(["init", "--name", "mine", "--update"]) == 0
    assert path.read_text().splitlines() == before
    assert "has all tables already" in capsys.readouterr().out

    database.execute('create table "Order Lines" (id int primary key)')
    database.execute('alter publication p set table kept, rekeyed, "Order Lines"')
    database.execute("alter table rekeyed replica identity using index rekeyed_other_key")
    assert main(["init", "--name", "mine", "--update"]) == 0
    printed = capsys.readouterr().out
    assert 'Added public."Order Lines", key: id.' in printed
    assert "public.gone is no longer in publication p. Its entry is kept" in printed
    assert "public.rekeyed has key (id) in the file and (other) in the source" in printed
    after = path.read_text().splitlines()
    assert after[:-4] + after[-1:] == before
    assert len(after) == len(before) + 3
    attributes = yaml.safe_load(path.read_text())["attributes"]
    assert attributes["windows"] == {"keep": 500}
    assert attributes["tables"][-1] == {"name": 'public."Order Lines"', "key": ["id"], "scd": [1]}

    assert main(["init", "--name", "mine", "--update", "--publication", "q"]) == 2
    assert "captures publication p, not q" in capsys.readouterr().err
    assert main(["init", "--name", "other", "--update"]) == 2
    assert "to update: write it by pgcdc init without --update" in capsys.readouterr().err
    assert main(["init", "--name", "mine", "--update", "--force"]) == 2
    path.write_text(path.read_text().replace("publication:", "publicaton:"))
    capsys.readouterr()
    assert main(["init", "--name", "mine", "--update"]) == 2
    assert "did you mean `publication`?" in capsys.readouterr().err


@pytest.mark.postgres
def test_only_tables_with_columns_that_delta_cannot_distinguish_are_omitted(
    project: Path, database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    database.execute('create table cased (id int primary key, "A" int, a int)')
    database.execute("create table ours (id int primary key, _lsn int)")
    database.execute("create table marked (id int primary key, _deleted bool)")
    database.execute("create publication p for table cased, ours, marked")
    assert main(["init", "--name", "mine", "--publication", "p"]) == 0
    printed = capsys.readouterr().out
    assert 'Omitted: Table public.cased cannot be merged: column "a" and column "A"' in printed
    assert 'Omitted: Table public.ours cannot be merged: column "_lsn"' in printed
    path = project / "defs" / "mine" / "defs.yaml"
    listed = DefsTables.read(path, "mine")
    assert [str(name) for name in listed.names] == ["public.marked"]

    assert main(["check", "--name", "mine"]) == 0
    path.write_text(path.read_text().replace("scd: [1]", "scd: [1]\n    soft_deletes: true"))
    listed = DefsTables.read(path, "mine")
    listed.add([CdcTable("public", "cased")])
    capsys.readouterr()
    assert main(["check", "--name", "mine"]) == 2
    printed_again = capsys.readouterr()
    assert 'Table public.marked cannot be merged: column "_deleted"' in printed_again.out
    assert "columns of public.cased, columns of public.marked" in printed_again.err


@pytest.mark.postgres
def test_a_name_that_dagster_would_read_as_a_template_is_not_written(
    project: Path, database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    """Dagster would replace this name by the connection string, and show it."""
    database.execute('create table good (id int primary key, "{% x" int)')
    database.execute('create table "{{ env.PGCDC_DSN }}" (id int primary key)')
    database.execute('create table keyed ("{# id" int primary key)')
    database.execute("create publication p for all tables")
    assert main(["init", "--name", "mine", "--publication", "p"]) == 0
    printed = capsys.readouterr().out
    assert 'Omitted: Table public."{{ env.PGCDC_DSN }}" has a template in its name' in printed
    assert "Omitted: Table public.keyed has a template in its name or key" in printed
    listed = DefsTables.read(project / "defs" / "mine" / "defs.yaml", "mine")
    assert [str(name) for name in listed.names] == ["public.good"]
    assert main(["check", "--name", "mine"]) == 0


@pytest.mark.postgres
def test_an_update_refuses_a_file_whose_tables_are_templates(
    project: Path,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The table would be added again under its name, and the file could not be loaded."""
    monkeypatch.setenv("PLACE", "public")
    database.execute("create table t (id int primary key); create publication p for table t")
    assert main(["init", "--name", "mine", "--publication", "p"]) == 0
    file = project / "defs" / "mine" / "defs.yaml"
    file.write_text(file.read_text().replace("name: public.t", "name: '{{ env.PLACE }}.t'"))
    assert main(["check", "--name", "mine"]) == 0
    before = file.read_text()
    assert main(["init", "--name", "mine", "--update"]) == 2
    assert "is a template" in capsys.readouterr().err
    assert file.read_text() == before


@pytest.mark.postgres
@pytest.mark.parametrize("options", ["", "for all tables"])
def test_a_followed_publication_may_have_no_tables_yet(
    project: Path, database: Database, capsys: pytest.CaptureFixture[str], options: str
) -> None:
    database.execute(f"create publication p {options}")
    assert main(["init", "--name", "mine", "--publication", "p"]) == 2
    assert main(["init", "--name", "mine", "--publication", "p", "--all-tables"]) == 0
    assert (project / "defs" / "mine" / "defs.yaml").is_file()
    capsys.readouterr()
    assert main(["check", "--name", "mine"]) == 0
    assert "warning  Publication p has no tables." in capsys.readouterr().out
    for command, what in (("rebuild", "rebuild"), ("resnapshot", "take a snapshot of")):
        assert main([command, "mine"]) == 2
        assert f"Capture mine has no table to {what}: pgcdc check" in capsys.readouterr().err
