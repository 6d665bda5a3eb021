"""Table names: every name can be printed and parsed, and different names have different texts."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.table_name import TableName, encode_name, folder_name, output_name

# All characters except NUL, and the characters that the encodings use.
LEGAL = st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), min_size=1)
TRICKY = st.text(st.sampled_from('a_.~X"25fe$- /U&\\\n'), min_size=1, max_size=8)
PARTS = LEGAL | TRICKY
NAMES = st.builds(TableName, PARTS, PARTS)
CHECKS = ("invariants", "invariants_in_full")


def decoded(text: str) -> str:
    return re.sub("~([0-9a-f]+)~", lambda match: chr(int(match[1], 16)), text)


def decoded_partition_key(key: str) -> TableName:
    schema, _, table = key.partition(".")
    return TableName(decoded(schema), decoded(table))


def decoded_identifier(text: str) -> list[str]:
    parts = text.split("__")
    return [re.sub("X([0-9a-f]+)X", lambda match: chr(int(match[1], 16)), part) for part in parts]


@given(NAMES)
@example(TableName("a.b", 'c"d'))
@example(TableName("U&", 'U&"\\0061"'))
@example(TableName("public", " "))
def test_a_printed_name_parses_as_the_same_name(name: TableName) -> None:
    assert TableName.parse(str(name)) == name


@given(NAMES)
@example(TableName("public", "_delta_log"))
def test_encodings_can_be_decoded_so_two_names_never_share_one(name: TableName) -> None:
    assert decoded(folder_name(name.table)) == decoded(encode_name(name.table)) == name.table
    assert decoded_partition_key(name.partition_key) == name
    parts = ["shop", "scd1", name.schema, name.table]
    assert decoded_identifier(output_name(parts, CHECKS)) == parts


@given(NAMES)
def test_encodings_have_only_allowed_characters(name: TableName) -> None:
    assert re.fullmatch(r"[A-Za-z0-9_$~-][A-Za-z0-9_$.~-]*", folder_name(name.table))
    assert re.fullmatch(r"[A-Za-z0-9_$.~-]+", name.partition_key)
    assert "..." not in name.partition_key
    assert re.fullmatch(r"[A-Za-z0-9_]+", output_name([name.schema, name.table]))


@given(NAMES, NAMES)
@example(TableName("a.b", "c"), TableName("a", "b.c"))
@example(TableName('"a.b"', "c"), TableName("a.b", "c"))
def test_record_names_of_different_tables_differ(one: TableName, other: TableName) -> None:
    assert one == other or one.record_name != other.record_name


@given(NAMES, NAMES)
@example(TableName("s", "a"), TableName("s", "a_invariants"))
def test_no_output_of_a_step_has_the_name_of_another_s_check(
    one: TableName, other: TableName
) -> None:
    outputs = [output_name([name.schema, name.table], CHECKS) for name in (one, other)]
    assert outputs[0] not in [f"{outputs[1]}_{check}" for check in CHECKS]


@given(st.from_regex(r"[a-z0-9_]+", fullmatch=True))
def test_a_plain_name_is_not_quoted(name: str) -> None:
    assert str(TableName("public", name)) == f"public.{name}"
    assert TableName("public", name).partition_key == f"public.{name}"
    assert TableName("public", name).record_name == f"public.{name}"
    assert encode_name(name) == folder_name(name) == name


def test_identifiers_of_plain_names_are_unchanged() -> None:
    assert output_name(["shop", "scd1", "shop", "order_items"], CHECKS) == (
        "shop__scd1__shop__order_items"
    )


@pytest.mark.parametrize("name", ["_delta_log", "_DELTA_LOG", "_spark_metadata"])
def test_a_folder_of_a_table_has_no_name_of_a_folder_of_delta_or_spark(name: str) -> None:
    assert folder_name(name) == f"~5f~{name[1:]}"
    assert encode_name(name) == name


@pytest.mark.parametrize("name", ["Orders", "a$b", "a-b", "a.b", "a..b", ".b", "_b", "A.b-C_1"])
def test_plain_names_keep_their_key_folder_and_partition(name: str) -> None:
    table = TableName.parse(f"public.{name}")
    assert table == TableName("public", name)
    assert table.partition_key == table.record_name == f"public.{name}"
    assert encode_name(name) == name
    assert folder_name(name) == (f"~2e~{name[1:]}" if name.startswith(".") else name)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("orders", TableName("public", "orders")),
        ("Sales.Orders", TableName("Sales", "Orders")),
        ('"Order Lines"', TableName("public", "Order Lines")),
        ("sales.Order Lines", TableName("sales", "Order Lines")),
        ('"a.b"."c"', TableName("a.b", "c")),
        ('a."b""c"', TableName("a", 'b"c')),
        ("a.b.c", TableName("a", "b.c")),
        ('U&"d\\0061t\\+000061".t', TableName("data", "t")),
    ],
)
def test_names_are_parsed_as_in_postgres_except_for_case(text: str, name: TableName) -> None:
    assert TableName.parse(text) == name


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "a.",
        ".a",
        '"',
        '""',
        '"a',
        'a"',
        'a."b"c',
        '"a"b',
        '"a".',
        " a.b",
        "a. b",
        'U&"\\"',
    ],
)
def test_a_malformed_name_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigurationError, match="does not name a table: write") as caught:
        TableName.parse(text)
    assert 'public."Order Lines"' in str(caught.value)


def test_control_characters_are_printed_as_escapes() -> None:
    assert str(TableName("public", "a\nb\\\u202e")) == 'public.U&"a\\000Ab\\\\\\202E"'
