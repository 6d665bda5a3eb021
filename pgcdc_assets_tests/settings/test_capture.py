"""Settings, and the errors of invalid settings."""

from __future__ import annotations

import datetime as dt
from dataclasses import fields
from typing import Any

import pytest
import yaml

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.orchestration.component_tables import TableModel
from pgcdc_assets.orchestration.project.defs_tables import component_yaml
from pgcdc_assets.orchestration.settings_metadata import (
    read_capture_settings,
    write_capture_settings,
)
from pgcdc_assets.settings import CdcCapture, CdcTable
from pgcdc_assets.settings.policies import (
    CheckPolicy,
    HeartbeatPolicy,
    MessagePolicy,
    RetentionPolicy,
    StreamPolicy,
    WindowPolicy,
)

ORDERS = CdcTable("shop", "orders", (1,), ("id",))


def test_a_table_without_a_schema_is_in_public() -> None:
    assert CdcTable.parse("orders") == CdcTable("public", "orders")


def test_a_table_name_keeps_everything_after_the_first_dot() -> None:
    assert CdcTable.parse("shop.a.b").table == "a.b"


def test_the_slot_is_named_after_the_capture() -> None:
    assert CdcCapture("shop", "pub", (ORDERS,)).slot == "pgcdc_shop"


@pytest.mark.parametrize("name", ["", "Shop", "1shop", "shop-2", "s" * 41, "shop orders"])
def test_a_name_that_cannot_name_a_slot_and_a_folder_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot name a capture"):
        CdcCapture(name, "pub", (ORDERS,))


def test_a_table_listed_twice_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"lists shop\.orders more than once"):
        CdcCapture("shop", "pub", (ORDERS, ORDERS))


def test_a_capture_without_tables_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigurationError, match="pgcdc init"):
        CdcCapture("shop", "pub", ())


def test_the_component_has_each_setting_of_a_table_with_the_same_default() -> None:
    settings = {each.name for each in fields(CdcTable)} - {"schema", "table"}
    assert set(TableModel.model_fields) == settings | {"name"}
    assert TableModel(name="shop.orders").table() == CdcTable("shop", "orders")


@pytest.mark.parametrize("name", ["shop.", ".orders", ""])
def test_half_a_table_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="does not name a table"):
        CdcTable.parse(name)


@pytest.mark.parametrize("scd", [[], [7], [1, 3]])
def test_an_unknown_kind_of_table_is_refused(scd: list[int]) -> None:
    with pytest.raises(ConfigurationError, match="scd is"):
        CdcTable.parse("shop.orders", scd)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"scd": [2], "soft_deletes": True}, "soft_deletes"),
        ({"soft_deletes": "yes"}, "soft_deletes"),
        ({"key": "id"}, "key is 'id', but must be a list of columns"),
        ({"scd": [2], "tracked": "id"}, "tracked is 'id', but must be a list of columns"),
        ({"without_key": "rows"}, "without_key is 'rows', but must be bag"),
        ({"on_schema_change": "heal"}, "on_schema_change is 'heal', but must be follow"),
        ({"on_poisoned_row": "skip"}, "on_poisoned_row is 'skip', but must be rescue"),
        ({"on_detached_partition": "x"}, "on_detached_partition is 'x', but must be delete"),
    ],
)
def test_contradictory_settings_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        CdcTable.parse("shop.orders", **settings)


def test_the_capture_s_policy_applies_to_tables_without_their_own_policy() -> None:
    tables = (ORDERS, CdcTable("shop", "items", on_schema_change="follow"))
    assert [t.schema_policy for t in CdcCapture("shop", "pub", tables).tables] == ["follow"] * 2
    asking = CdcCapture("shop", "pub", tables, on_schema_change="ask")
    assert [t.schema_policy for t in asking.tables] == ["ask", "follow"]
    assert read_capture_settings(write_capture_settings(asking)) == asking
    assert [t.row_policy for t in asking.tables] == ["rescue", "rescue"]
    stopping = CdcCapture("shop", "pub", tables, on_poisoned_row="stop")
    assert [(t.schema_policy, t.row_policy) for t in stopping.tables] == [("follow", "stop")] * 2
    assert [t.keeps_partitions for t in stopping.tables] == [False, False]
    own = (ORDERS, CdcTable("shop", "items", on_detached_partition="delete"))
    keeping = CdcCapture("shop", "pub", own, on_detached_partition="keep")
    assert [t.keeps_partitions for t in keeping.tables] == [True, False]
    assert keeping.keepers == [ORDERS.name]
    assert read_capture_settings(write_capture_settings(keeping)) == keeping
    with pytest.raises(ConfigurationError, match="Capture shop: on_schema_change is 'never'"):
        CdcCapture("shop", "pub", tables, on_schema_change="never")
    with pytest.raises(ConfigurationError, match="catalog_poll_seconds"):
        CdcCapture("shop", "pub", tables, catalog_poll_seconds=-1)


def test_heartbeats_and_messages_are_the_same_after_a_round_trip_through_metadata() -> None:
    for messages in (MessagePolicy(), MessagePolicy(("audit", 'odd "prefix"'), table=False)):
        capture = CdcCapture(
            "shop", "pub", (ORDERS,), heartbeat=HeartbeatPolicy(5, "shop.beats"), messages=messages
        )
        assert read_capture_settings(write_capture_settings(capture)) == capture


@pytest.mark.parametrize("prefixes", [[], "audit", [7], ["a\0b"]])
def test_prefixes_that_no_message_has_are_refused(prefixes: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"messages\.prefixes"):
        MessagePolicy(prefixes)


def test_types_of_columns_are_read_without_blanks_and_kept_as_json() -> None:
    types = {"a": "decimal( 20, 5)", "b": "map<string, string>", "c": "Variant", "d": "STRING"}
    types["e"] = " struct<months  int, days:INT,\tmicroseconds : bigint >"
    table = CdcTable.parse("shop.orders", types=types)
    assert table.types == {
        "a": "DECIMAL(20,5)",
        "b": "MAP<STRING,STRING>",
        "c": "VARIANT",
        "d": "STRING",
        "e": "STRUCT<MONTHS INT,DAYS INT,MICROSECONDS BIGINT>",
    }
    capture = CdcCapture("shop", "pub", (table,))
    assert read_capture_settings(write_capture_settings(capture)) == capture
    assert hash(table) == hash(CdcTable.parse("shop.orders"))


@pytest.mark.parametrize(
    "ddl",
    [
        "INTERVAL",
        "INTERVAL DAY TO SECOND",
        "STRUCT<a INT>",
        "DECIMAL(39,0)",
        "DECIMAL(5,6)",
        "DECIMAL",
        "",
        "INT",
    ],
)
def test_another_type_of_a_column_is_refused(ddl: str) -> None:
    with pytest.raises(ConfigurationError, match="types gives column a the type"):
        CdcTable.parse("shop.orders", types={"a": ddl})


def test_windows_without_a_size_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"windows\.max_bytes"):
        WindowPolicy(max_bytes=0)
    with pytest.raises(ConfigurationError, match=r"stream\.batch_bytes"):
        StreamPolicy(batch_bytes=0)
    with pytest.raises(ConfigurationError, match=r"stream\.streaming must be off, on or parallel"):
        StreamPolicy(streaming="auto")


@pytest.mark.parametrize("count", [0, 0.5, -1, float("nan")])
@pytest.mark.parametrize("unit", ["old_version_hours", "old_version_days"])
def test_the_retention_of_old_versions_has_a_minimum(unit: str, count: float) -> None:
    options: dict[str, Any] = {unit: count}
    with pytest.raises(ConfigurationError, match=rf"retention\.{unit} must be 1 or more"):
        RetentionPolicy(**options)


@pytest.mark.parametrize(
    ("setting", "remedy"),
    [
        ("raw_days", "days. Omit the setting to keep every window"),
        ("record_days", "days. Set null to keep every record"),
        ("old_version_days", "Set a number: no value keeps replaced files without a limit"),
        ("old_version_hours", "Set a number: no value keeps replaced files without a limit"),
    ],
)
def test_a_retention_that_reaches_before_the_first_year_is_refused(
    setting: str, remedy: str
) -> None:
    longest = 36_500 * (24 if setting == "old_version_hours" else 1)
    accepted: dict[str, Any] = {setting: longest}
    policy = RetentionPolicy(**accepted)
    for days in (policy.raw_days, policy.record_days, policy.keep_hours / 24):
        assert dt.datetime.now(dt.UTC) - dt.timedelta(days=days or 0)
    for count in (longest + 0.5, 999_999 * 24, float("inf")):
        refused: dict[str, Any] = {setting: count}
        with pytest.raises(ConfigurationError, match=rf"retention\.{setting} .*{remedy}$"):
            RetentionPolicy(**refused)


@pytest.mark.parametrize("setting", ["raw_days", "record_days"])
@pytest.mark.parametrize("count", [-1, float("nan")])
def test_a_retention_is_a_number_of_days(setting: str, count: float) -> None:
    options: dict[str, Any] = {setting: count}
    with pytest.raises(ConfigurationError, match=rf"retention\.{setting} must be between 0 and"):
        RetentionPolicy(**options)


def test_days_take_precedence_over_hours() -> None:
    assert RetentionPolicy().keep_hours == 1
    assert RetentionPolicy(old_version_hours=12).keep_hours == 12
    assert RetentionPolicy(old_version_hours=12, old_version_days=2).keep_hours == 48


@pytest.mark.parametrize("ratio", [-0.1, float("nan")])
def test_a_negative_ratio_is_refused(ratio: float) -> None:
    with pytest.raises(ConfigurationError, match=r"retention\.replaced_ratio"):
        RetentionPolicy(replaced_ratio=ratio)


def test_settings_survive_a_round_trip_through_an_asset_s_metadata() -> None:
    capture = CdcCapture(
        "shop",
        "pub",
        (
            ORDERS,
            CdcTable("public", "events", soft_deletes=True),
            CdcTable("public", "log", without_key="log"),
        ),
        slot="other",
        windows=WindowPolicy(keep=5),
        stream=StreamPolicy(total_seconds=60, streaming="on"),
        checks=CheckPolicy(None),
    )
    assert read_capture_settings(write_capture_settings(capture)) == capture


def test_the_yaml_of_init_names_every_table_with_its_key() -> None:
    written = yaml.safe_load(component_yaml("shop", "pub", [ORDERS], slot="pgcdc_shop"))
    assert written == {
        "type": "pgcdc_assets.PostgresCdcComponent",
        "attributes": {
            "name": "shop",
            "publication": "pub",
            "tables": [{"name": "shop.orders", "key": ["id"], "scd": [1]}],
        },
    }


def test_the_yaml_of_init_has_a_slot_with_another_name() -> None:
    written = yaml.safe_load(component_yaml("shop", "pub", [ORDERS], slot="mine"))
    assert written["attributes"]["slot"] == "mine"
