"""Commands on several captures: an error of one capture does not stop the next one."""

from __future__ import annotations

from pathlib import Path

import pytest

from pgcdc_assets.cli import main
from pgcdc_assets.raw.delta.log_entries import commit_path

_COMPONENT = """type: pgcdc_assets.PostgresCdcComponent
attributes: {{name: {name}, publication: p, tables: {tables}}}
"""


def test_a_lake_that_cannot_be_read_does_not_stop_the_sync_of_the_next_capture(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    quick_dagster_storage: None,
) -> None:
    for name, tables in (("first", "all"), ("second", "[{name: public.t}]")):
        folder = tmp_path / "defs" / name
        folder.mkdir(parents=True)
        (folder / "defs.yaml").write_text(_COMPONENT.format(name=name, tables=tables))
    (tmp_path / "dagster").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "dagster"))
    monkeypatch.setenv("PGCDC_LAKE", str(tmp_path / "lake"))
    monkeypatch.setenv("PGCDC_DSN", "postgresql://nobody@127.0.0.1:1/nowhere")
    epochs = tmp_path / "lake" / "first" / "raw" / "epochs" / commit_path(0)
    epochs.parent.mkdir(parents=True)
    epochs.write_text("{")
    assert main(["sync"]) == 3
    error = capsys.readouterr().err
    assert "pgcdc: first: The Delta table " in error
    assert "pgcdc: second: " in error
    assert "127.0.0.1" in error
