"""An error in a defs.yaml is one sentence with file, line, column, setting and remedy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pgcdc_assets.cli import main
from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.orchestration.assets.raw import capture_limits
from pgcdc_assets.orchestration.project.code_location import find_captures, load_defs_folders
from pgcdc_assets.postgres.stream.plugin_options import PluginOptions, Streaming
from pgcdc_assets.settings.catalog import CatalogPolicy
from pgcdc_assets.settings.policies import HeartbeatPolicy

HEAD = "type: pgcdc_assets.PostgresCdcComponent\nattributes:\n"
GOOD = HEAD + "  name: shop\n  publication: shop\n"
TABLE = "  tables:\n    - {name: shop.orders}\n"
MODULE = """
from pathlib import Path
from pgcdc_assets.orchestration.project.code_location import load_defs_folders

defs = load_defs_folders([Path({folder!r})])
"""

WRONG = {
    "an unknown setting": (
        HEAD + "  name: shop\n  publicaton: shop\n" + TABLE,
        "4:3: unknown setting `publicaton` in `attributes`; did you mean `publication`?",
    ),
    "an unknown setting of a table": (
        GOOD + "  tables:\n    - {name: t, keys: [id]}\n",
        "6:17: unknown setting `keys` in `tables[0]`; did you mean `key`?",
    ),
    "an unknown setting like no other": (
        GOOD + TABLE + "  zzz: 1\n",
        "7:3: unknown setting `zzz` in `attributes`; known are name, publication, ",
    ),
    "an unknown kind of table": (
        GOOD + "  tables:\n    - {name: shop.orders, scd: [3]}\n",
        "6:32: Table shop.orders: scd is [3], but must be [1] (the current image), ",
    ),
    "a kind of table that is a text": (
        GOOD + "  tables:\n    - {name: shop.orders, scd: [one]}\n",
        "6:33: `tables[0].scd` must be a whole number",
    ),
    "a bad name": (
        HEAD + "  name: Sales-Prod\n  publication: shop\n" + TABLE,
        "3:9: 'Sales-Prod' cannot name a capture: use 1 to 40 lower-case letters, ",
    ),
    "half a table's name": (
        GOOD + "  tables:\n    - name: shop.\n",
        "6:13: 'shop.' does not name a table: write schema.table, ",
    ),
    "a table listed twice": (
        GOOD + TABLE + '    - {name: \'"shop"."orders"\'}\n',
        "7:7: table shop.orders is listed twice",
    ),
    "another word for all tables": (
        GOOD + "  tables: everything\n",
        "5:11: `tables` must be a list, with `- name: ...` for each entry, or all",
    ),
    "another word for streaming": (
        GOOD + TABLE + "  stream: {streaming: sometimes}\n",
        "7:23: `stream.streaming` must be off, on or parallel",
    ),
    "a number for streaming": (
        GOOD + TABLE + "  stream: {streaming: 1}\n",
        "7:23: `stream.streaming` must be off, on or parallel",
    ),
    "a pattern without a schema": (
        GOOD + "  tables: all\n  all_tables: {exclude: [tmp_*]}\n",
        "6:25: 'tmp_*' is not a pattern of table names: write schema.table, ",
    ),
    "patterns beside a list": (
        GOOD + TABLE + "  all_tables: {exclude: [shop.tmp]}\n",
        "7:15: `all_tables` has an effect with `tables: all` only",
    ),
    "settings of a table that is excluded": (
        GOOD + "  tables: all\n  all_tables: {exclude: [a.*], named: [{name: a.b}]}\n",
        "6:25: Table a.b has settings of its own, but matches the pattern a.* of exclude",
    ),
    "an unknown kind of all tables": (
        GOOD + "  tables: all\n  all_tables: {scd: [3]}\n",
        "6:21: Table all_tables.*: scd is [3], but must be [1] (the current image), ",
    ),
    "a text for a number": (
        GOOD + TABLE + "  windows: {max_bytes: sesame}\n",
        "7:24: `windows.max_bytes` must be a whole number",
    ),
    "a truth value for a number": (
        GOOD + TABLE + "  merge_parallelism: yes\n",
        "7:22: `merge_parallelism` must be a whole number",
    ),
    "a number out of range": (
        GOOD + TABLE + "  windows:\n    keep: 0\n",
        "8:11: windows.keep must be 1 or more",
    ),
    "no parallelism": (
        GOOD + TABLE + "  merge_parallelism: 0\n",
        "7:22: merge_parallelism must be 1 or more",
    ),
    "a text for a truth value": (
        GOOD + "  tables:\n    - {name: t, soft_deletes: perhaps}\n",
        "6:31: `tables[0].soft_deletes` must be true or false",
    ),
    "a bad slot": (
        GOOD + TABLE + "  slot: My Slot\n",
        "7:9: 'My Slot' cannot name a slot: use 1 to 63 lower-case letters, ",
    ),
    "a bad schedule": (
        GOOD + TABLE + "  retention: {schedule: never}\n",
        "7:25: `retention.schedule` must be a cron expression of five fields, such as 17 3 * * *",
    ),
    "a bad schedule of the checks": (
        GOOD + TABLE + "  checks: {schedule: 1 2 3}\n",
        "7:22: `checks.schedule` must be a cron expression of five fields, such as 17 3 * * *",
    ),
    "a catalog of an unknown type": (
        GOOD + TABLE + "  catalog: {schema: cdc, type: glue}\n",
        "7:32: catalog.type is 'glue', but must be session (the catalog of the Spark session), ",
    ),
    "a catalog without a schema": (
        GOOD + TABLE + "  catalog: {type: hive}\n",
        "7:12: `schema` is missing: the schema of the entries in the catalog",
    ),
    "a list for a mapping": (
        HEAD + "  - name: shop\n",
        "3:3: `attributes` must be a mapping, with lines such as `name: ...`",
    ),
    "a mapping for a list": (
        GOOD + "  tables:\n    shop.orders: {}\n",
        "6:5: `tables` must be a list, with `- name: ...` for each entry",
    ),
    "a name for a table's settings": (
        GOOD + "  tables: [shop.orders]\n",
        "5:12: `tables[0]` must be a mapping, with lines such as `name: ...`",
    ),
    "no tables": (
        GOOD + "  tables: []\n",
        "5:11: Capture shop lists no tables: run `pgcdc init` to write the publication's tables",
    ),
    "tables without a value": (GOOD + "  tables:\n", "5:10: `tables` must be a list, "),
    "a missing setting": (
        HEAD + "  name: shop\n" + TABLE,
        "3:3: `publication` is missing: the publication to capture; it must exist",
    ),
    "a setting twice": (
        GOOD + TABLE + "  name: shop2\n",
        "7:3: `name` is set twice in `attributes`",
    ),
    "a variable that is not set": (
        GOOD + TABLE + "  storage_options: {key: '{{ env.PGCDC_NOT_SET }}'}\n",
        "7:26: `storage_options.key` refers to the environment variable PGCDC_NOT_SET, which is "
        "not set",
    ),
    "a tab": (
        HEAD + "\tname: shop\n",
        "3:1: not valid YAML: found character '\\t' that cannot start any token; indent with ",
    ),
    "an open bracket": (HEAD + "  {name: shop\n", "4:1: not valid YAML: expected ',' or '}'"),
    "an unknown tag": (
        GOOD + TABLE + "  slot: !sesame\n",
        "7:9: not valid YAML: a text that begins with ! must be in quotes",
    ),
    "an unknown tag of a section": (
        GOOD + TABLE + "  windows: !sesame {keep: 3}\n",
        "7:12: not valid YAML: a text that begins with ! must be in quotes",
    ),
    "an alias without an anchor": (
        GOOD + TABLE + "  slot: *sesame\n",
        "7:9: not valid YAML: a text that begins with * must be in quotes",
    ),
    "a template without quotes": (
        GOOD + TABLE + "  slot: {{ env.SLOT }}\n",
        "7:10: not valid YAML: a template must be in quotes",
    ),
    "a text with the tag of a number": (
        GOOD + TABLE + "  merge_parallelism: !!int sesame\n",
        "7:22: not valid YAML: a value does not have the form of its type",
    ),
    "a list in itself": (GOOD + "  tables: &a [*a]\n", "5:11: not valid YAML: found unconstruct"),
    "an option twice": (
        GOOD + TABLE + "  spark_config: {spark.a: x, spark.a: y}\n",
        "7:30: `spark.a` is set twice in `spark_config`",
    ),
    "no type": ("attributes:\n  name: shop\n", "1:1: `type` is missing; for a capture it is "),
    "a misspelt type": (
        "type: pgcdc_assets.PostgresCdcComponet\nattributes: {}\n",
        "1:7: there is no component pgcdc_assets.PostgresCdcComponet; did you mean ",
    ),
    "no attributes": (
        "type: pgcdc_assets.PostgresCdcComponent\natributes: {}\n",
        "2:1: unknown setting `atributes` in the file; did you mean `attributes`?",
    ),
    "a list for the file": ("- a\n", "1:1: the file must be a mapping, "),
}


def written(folder: Path, text: str) -> Path:
    path = folder / "defs" / "shop" / "defs.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize("case", WRONG)
def test_the_error_names_the_place_and_what_is_allowed(case: str, tmp_path: Path) -> None:
    text, sentence = WRONG[case]
    path = written(tmp_path, text)
    with pytest.raises(ConfigurationError) as caught:
        load_defs_folders([tmp_path / "defs"])
    assert str(caught.value).startswith(f"{path}:{sentence}")
    assert "\n" not in str(caught.value)
    assert "sesame" not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__cause__ is not None


@pytest.mark.parametrize("content", [b"", b"# nothing\n", b"---\n"])
def test_an_empty_file_is_named(content: bytes, tmp_path: Path) -> None:
    path = written(tmp_path, "")
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"defs\.yaml: the file is empty; it must have"):
        load_defs_folders([tmp_path / "defs"])


def test_a_file_in_another_encoding_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, "")
    path.write_bytes(b"type: \xff\xfe\n")
    with pytest.raises(ConfigurationError, match=r"defs\.yaml cannot be read as YAML in UTF-8"):
        load_defs_folders([tmp_path / "defs"])


def test_an_error_names_both_files_that_declare_one_capture(tmp_path: Path) -> None:
    written(tmp_path, GOOD + TABLE)
    written(tmp_path / "defs" / "more", GOOD + TABLE)
    with pytest.raises(ConfigurationError, match=r"defs\.yaml declares a capture named shop too"):
        load_defs_folders([tmp_path / "defs"])


def test_a_value_from_the_environment_is_checked_after_its_template_is_rendered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, GOOD.replace("name: shop", "name: '{{ env.CAPTURE_NAME }}'") + TABLE)
    monkeypatch.setenv("CAPTURE_NAME", "fine")
    assert set(find_captures(load_defs_folders([tmp_path / "defs"]))) == {"fine"}
    monkeypatch.setenv("CAPTURE_NAME", "Not-Fine")
    with pytest.raises(ConfigurationError, match="'Not-Fine' cannot name a capture") as caught:
        load_defs_folders([tmp_path / "defs"])
    assert "shop" in str(caught.value).split(":")[0]


def test_an_undefined_template_is_named(tmp_path: Path) -> None:
    written(tmp_path, GOOD.replace("name: shop", "name: '{{ nope }}'") + TABLE)
    with pytest.raises(ConfigurationError, match=r"defs\.yaml:3 .*'nope' is undefined"):
        load_defs_folders([tmp_path / "defs"])


def test_options_of_spark_and_of_the_store_are_texts_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dagster evaluates the text of a setting, and "2" would be a number."""
    monkeypatch.setenv("CORES", "1e1")
    options = """ {number: "2", word: "true", pair: "1,2", quotes: "'a'", empty: "", none: None,
    variable: "{{ env.CORES }}", longer: "{{ env.CORES }}m"}
"""
    written(tmp_path, f"{GOOD}  spark_config:{options}  storage_options:{options}{TABLE}")
    loaded = find_captures(load_defs_folders([tmp_path / "defs"]))["shop"]
    expected = {
        "number": "2",
        "word": "true",
        "pair": "1,2",
        "quotes": "'a'",
        "empty": "",
        "none": "None",
        "variable": "1e1",
        "longer": "1e1m",
    }
    assert loaded.spark.spark_config == loaded.lake.storage_options == expected
    other = tmp_path / "other"
    written(other, f"{GOOD}  spark_config: {{cores: '{{{{ nope }}}}'}}\n{TABLE}")
    with pytest.raises(ConfigurationError, match=r"defs\.yaml:\d+ .*'nope' is undefined"):
        load_defs_folders([other / "defs"])


def test_names_are_texts_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dagster evaluates the text of a setting, and "2024" would be a number."""
    monkeypatch.setenv("TRACKED", "30")
    settings = """  name: shop
  publication: "2024"
  slot: "1_0"
  messages: {prefixes: ["1", None]}
  tables:
    - {name: "1.5", key: [2026-13-45, None], scd: [2], tracked: ["1,2", "{{ env.TRACKED }}"]}
"""
    written(tmp_path, HEAD + settings)
    capture = find_captures(load_defs_folders([tmp_path / "defs"]))["shop"].capture
    assert (capture.publication, capture.slot) == ("2024", "1_0")
    assert capture.messages is not None and capture.messages.prefixes == ("1", "None")
    (table,) = capture.tables
    assert table.name == ("1", "5")
    assert (table.key, table.tracked) == (("2026-13-45", "None"), ("1,2", "30"))


def test_every_documented_setting_is_accepted(tmp_path: Path) -> None:
    settings = """  slot: other
  dsn_env: SHOP_DSN
  primary_dsn_env: SHOP_PRIMARY_DSN
  lake: /data/lake
  storage_options: {region: eu}
  spark_remote: null
  spark_config: {spark.driver.memory: 8g}
  windows: {max_bytes: 1000000, min_bytes: 1000, max_age_seconds: 0.5, retry_seconds: 1, keep: 50}
  stream: {batch_bytes: 1000, total_seconds: null, slot_wait_seconds: 1, streaming: parallel}
  retention: {raw_days: 30, old_version_days: 7, schedule: "0 4 * * *"}
  checks: {schedule: null}
  catalog: {schema: cdc, type: hive}
  heartbeat: {seconds: 30}
  merge_step: {changes: 1000, bytes: 1000000}
  merge_parallelism: 4
  verify_wait_seconds: 10
  is_sample: false
  tables:
    - {name: shop.orders, key: [id], scd: [1, 2], tracked: [status], soft_deletes: true}
    - name: '"a.b"."Order Lines"'
      without_key: log
"""
    written(tmp_path, GOOD + settings)
    loaded = find_captures(load_defs_folders([tmp_path / "defs"]))["shop"]
    capture = loaded.capture
    assert loaded.postgres.primary_dsn_env == "SHOP_PRIMARY_DSN"
    assert [str(table.name) for table in capture.tables] == ["shop.orders", '"a.b"."Order Lines"']
    assert capture.windows.max_age_seconds == 0.5
    assert capture.catalog == CatalogPolicy("cdc", "hive") and loaded.spark.hive
    assert capture.heartbeat == HeartbeatPolicy(30)


@pytest.mark.parametrize(
    ("written_as", "mode"),
    [
        ("off", Streaming.OFF),
        ("on", Streaming.ON),
        ("'on'", Streaming.ON),
        ("false", Streaming.OFF),
        ("true", Streaming.ON),
        ("'{{ env.STREAMING }}'", Streaming.ON),
        ("parallel", Streaming.PARALLEL),
    ],
)
def test_streaming_is_written_as_a_word_or_as_the_boolean_of_yaml(
    written_as: str, mode: Streaming, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMING", "on")
    written(tmp_path, GOOD + TABLE + f"  stream: {{streaming: {written_as}}}\n")
    policy = find_captures(load_defs_folders([tmp_path / "defs"]))["shop"].capture.stream
    assert policy.streaming == str(mode)
    assert capture_limits(policy).stream.plugin == PluginOptions(mode)


@pytest.mark.parametrize("command", ["check", "sync", "status", "verify"])
def test_every_command_ends_with_status_2_and_the_sentence(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = written(tmp_path, GOOD + TABLE + "  windows: {max_bytes: sesame}\n")
    name = f"location_{command}"
    (tmp_path / f"{name}.py").write_text(MODULE.format(folder=str(tmp_path / "defs")))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main([command, "-m", name, "--debug"]) == 2
    printed = capsys.readouterr()
    last = printed.err.strip().splitlines()[-1]
    assert last == f"pgcdc: {path}:7:24: `windows.max_bytes` must be a whole number"
    assert "sesame" not in printed.out + printed.err


@pytest.mark.sampled
@pytest.mark.slow
def test_validation_by_dagster_prints_the_same_sentence(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD + TABLE + "  windows: {max_bytes: sesame}\n")
    (tmp_path / "location.py").write_text(MODULE.format(folder=str(tmp_path / "defs")))
    command = ("-m", "dagster", "definitions", "validate", "-f", str(tmp_path / "location.py"))
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "DAGSTER_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert f"{path}:7:24: `windows.max_bytes` must be a whole number" in done.stdout + done.stderr
    assert "sesame" not in done.stdout + done.stderr
