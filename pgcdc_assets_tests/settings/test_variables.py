"""A secret in a setting that names an environment variable is refused, and not shown."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

import dagster as dg
import pytest

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.orchestration.project import home
from pgcdc_assets.orchestration.project.code_location import load_defs_folders
from pgcdc_assets.orchestration.resources import LakeResource, PostgresResource, open_resources
from pgcdc_assets.settings.policies import SnapshotPolicy
from pgcdc_assets.settings.storage import Storage, storage_of
from pgcdc_assets.settings.variables import check_variable_name

# The texts that a user may write by mistake: a URI, a connection string, and keys of a store.
SECRETS = (
    "postgresql://bob:sesame@source/shop",
    "host=source password=sesame",
    "sesame/K7MDENG+bPxRfiCY",
    "7sesame",
    "sesame\n",
    " SESAME_DSN",
)
SETTINGS = (
    "dsn_env",
    "primary_dsn_env",
    "snapshot.dsn_env",
    "storage.access_key_env",
    "storage.secret_key_env",
    "storage.session_token_env",
)
DEFS = """type: pgcdc_assets.PostgresCdcComponent
attributes:
  name: shop
  publication: shop
  tables: [{name: shop.orders}]
"""


def _python(setting: str, text: str) -> list[Callable[[], object]]:
    """Return the calls of Python code that set the setting."""
    section, _, name = setting.rpartition(".")
    value = {name: text}
    if section == "storage":
        return [
            lambda: Storage(**value),  # type: ignore[arg-type]
            lambda: storage_of(value),
            lambda: LakeResource(storage=value),
        ]
    if section == "snapshot":
        return [lambda: SnapshotPolicy(dsn_env=text)]
    calls: list[Callable[[], object]] = [
        lambda: PostgresResource(capture="shop", **value),  # type: ignore[arg-type]
    ]
    return [*calls, lambda: home.conninfo(text)] if setting == "dsn_env" else calls


def _written(folder: Path, setting: str, text: str) -> list[Path]:
    section, _, name = setting.rpartition(".")
    line = f"{name}: '{text}'"
    path = folder / "shop" / "defs.yaml"
    path.parent.mkdir()
    path.write_text(f"{DEFS}  {section}: {{{line}}}\n" if section else f"{DEFS}  {line}\n")
    return [folder]


def _assert_refused(call: Callable[[], object], setting: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        call()
    shown = "".join(traceback.format_exception(caught.value))
    assert setting in str(caught.value)
    assert "sesame" not in shown.lower()
    return str(caught.value)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("text", SECRETS)
def test_python_code_cannot_set_a_secret_instead_of_the_name_of_a_variable(
    text: str, setting: str
) -> None:
    for call in _python(setting, text):
        sentence = _assert_refused(call, setting)
        assert sentence.startswith(f"{setting} must name an environment variable, by letters")
        assert "Write the name of the variable, not its value" in sentence


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_file_cannot_set_a_secret_instead_of_the_name_of_a_variable(
    setting: str, tmp_path: Path
) -> None:
    folders = _written(tmp_path, setting, SECRETS[0])
    sentence = _assert_refused(lambda: load_defs_folders(folders), setting)
    assert f"defs.yaml:6:{sentence.split(':')[2]}: {setting} must name" in sentence


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_template_of_a_file_cannot_insert_a_secret(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_VARIABLE", "host=source password=sesame")
    folders = _written(tmp_path, setting, "{{ env.SHOP_VARIABLE }}")
    sentence = _assert_refused(lambda: load_defs_folders(folders), setting)
    assert str(tmp_path / "shop") in sentence


@pytest.mark.parametrize("setting", SETTINGS[3:])
def test_a_template_of_a_file_cannot_insert_a_key_that_looks_like_a_name(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_KEY", "AKIASESAME")
    folders = _written(tmp_path, setting, "{{ env.SHOP_KEY }}")
    sentence = _assert_refused(lambda: load_defs_folders(folders), setting)
    assert sentence.endswith("the template inserts the value of SHOP_KEY. Write SHOP_KEY")


def test_a_template_may_insert_a_part_of_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGE", "TEST")
    folders = _written(tmp_path, "storage.access_key_env", "{{ env.STAGE }}_KEY")
    load_defs_folders(folders)


def test_a_resource_that_reads_the_secret_from_a_variable_is_a_wrong_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SHOP_DSN", SECRETS[0])
    resource = PostgresResource(capture="shop", dsn_env=dg.EnvVar("SHOP_DSN"))

    def opened() -> None:
        with open_resources({"postgres": resource}):
            pass

    _assert_refused(opened, "dsn_env")


@pytest.mark.parametrize("name", ["PGCDC_DSN", "_shop2", "x"])
def test_a_name_of_a_variable_is_accepted(name: str) -> None:
    check_variable_name(name, "dsn_env")
