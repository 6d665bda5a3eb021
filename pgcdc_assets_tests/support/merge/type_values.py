"""Values of every family of types, and their expected values after a merge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# The typed column is NULL, and `_rescued` has Postgres's text.
RESCUED = object()
# The column has Postgres's text.
SAME = object()


@dataclass(frozen=True)
class Case:
    """One column and its values: SQL literals, each with the expected text of the SCD1 column."""

    declared: str
    values: tuple[tuple[str, Any], ...]


def _case(declared: str, *values: tuple[str, Any]) -> Case:
    return Case(declared, values)


def _texts(declared: str, *literals: str) -> Case:
    return Case(declared, tuple((literal, SAME) for literal in literals))


_DIGITS = "repeat('9', 1000) || '.' || repeat('7', 500)"

G1 = [
    _texts("numeric", "'1.10'", "'-0.000000000001'", "'NaN'", "'Infinity'", "'-Infinity'"),
    _texts("numeric", f"({_DIGITS})::numeric", "repeat('9', 131072)::numeric", "'0'"),
    _texts("numeric(50,20)", "123456789012345678901234567890.12345678901234567890", "'NaN'"),
    _case(
        "numeric(5,-2)",
        ("1234567", "1234600"),
        ("-9999900", "-9999900"),
        ("49", "0"),
        ("'NaN'", RESCUED),
    ),
    _case("numeric(3,5)", ("0.00123", "0.00123"), ("-0.00999", "-0.00999"), ("'NaN'", RESCUED)),
    _case(
        "numeric(38,10)",
        ("1234567890123456789012345678.0123456789", "1234567890123456789012345678.0123456789"),
        ("-0.0000000001", "-0.0000000001"),
    ),
    _case("numeric(10,2)", ("1.1", "1.10"), ("-99999999.99", "-99999999.99"), ("0", "0.00")),
]

G2 = [
    _texts("money", "'-1234.56'", "'92233720368547758.07'", "'0'"),
    _case("int2", ("-32768", "-32768"), ("32767", "32767")),
    _case("int8", ("-9223372036854775808", "-9223372036854775808"), ("0", "0")),
    _case("oid", ("4294967295", "4294967295")),
    _case("boolean", ("true", "true"), ("false", "false")),
    _case(
        "float8",
        ("'NaN'", "NaN"),
        ("'-Infinity'", "-Infinity"),
        ("0.1::float8 + 0.2::float8", "0.30000000000000004"),
        ("1.7976931348623157e308", "1.7976931348623157E308"),
        ("5e-324", "4.9E-324"),
        ("'-0'", "-0.0"),
    ),
    _case("float4", ("3.4028235e38", "3.4028235E38"), ("1e-45", "1.4E-45"), ("1.1", "1.1")),
]

G3 = [
    _case(
        "date",
        ("'infinity'", RESCUED),
        ("'-infinity'", RESCUED),
        ("'0044-03-15 BC'", RESCUED),
        ("'0001-01-01'", "0001-01-01"),
        ("'1582-10-10'", "1582-10-10"),
        ("'9999-12-31'", "9999-12-31"),
        ("'10000-01-01'", RESCUED),
        ("'5874897-12-31'", RESCUED),
        ("'2000-02-29'", "2000-02-29"),
    ),
    _case(
        "timestamp",
        ("'infinity'", RESCUED),
        ("'-infinity'", RESCUED),
        ("'0044-03-15 12:00:00.000001 BC'", RESCUED),
        ("'294276-12-31 23:59:59.999999'", RESCUED),
        ("'1582-10-10 10:00'", "1582-10-10 10:00:00"),
        ("'0001-01-01 00:00:00.000001'", "0001-01-01 00:00:00.000001"),
        ("'9999-12-31 23:59:59.999999'", "9999-12-31 23:59:59.999999"),
        ("'1999-12-31 24:00'", "2000-01-01 00:00:00"),
        ("'1969-12-31 23:59:59.999999'", "1969-12-31 23:59:59.999999"),
    ),
    _case(
        "timestamp[]",
        ("'{infinity}'", RESCUED),
        ("'{2024-01-01 10:00:00.5,NULL}'", '["2024-01-01T10:00:00.500",null]'),
        ("'{}'", "[]"),
    ),
    _case("date[]", ("'{2024-01-01,-infinity}'", RESCUED), ("'{2024-01-01}'", '["2024-01-01"]')),
    _texts("time", "'24:00'", "'00:00:00.000001'"),
    _texts("timetz", "'24:00+05:30'", "'10:00-15:59:59'"),
    _texts("interval", "'-1 year +2 days -03:04:05.678'", "'0'"),
]

G4 = [
    _case(
        "timestamptz",
        ("'2024-01-01 00:00:00+05:30'", "2023-12-31 18:30:00"),
        ("'2024-03-31 01:30:00 Europe/Berlin'", "2024-03-31 00:30:00"),
        ("'2024-10-27 02:30:00+02'", "2024-10-27 00:30:00"),
        ("'2024-10-27 02:30:00+01'", "2024-10-27 01:30:00"),
        ("'1880-01-01 00:00:00+00:19:32'", "1879-12-31 23:40:28"),
        ("'infinity'", RESCUED),
        ("'-infinity'", RESCUED),
        ("'0044-03-15 12:00:00+00 BC'", RESCUED),
        ("'294276-12-31 23:59:59.999999+00'", RESCUED),
        ("'2024-01-01 00:00:00.123456+00'", "2024-01-01 00:00:00.123456"),
    ),
]

G5 = [
    _case(
        "text[]",
        ("null", None),
        ("'{}'", "[]"),
        ("""'{""}'""", '[""]'),
        ("""'{NULL,"NULL","null"}'""", '[null,"NULL","null"]'),
        ("""array['a,b', 'c"d', 'e\\f', '{g}', ' h ']""", r'["a,b","c\"d","e\\f","{g}"," h "]'),
        ("array[E'line\\nbreak', E'tab\\t', 'ü€😀', '']", r'["line\nbreak","tab\t","ü€😀",""]'),
        ("'{{a,b},{c,d}}'", RESCUED),
        ("'[0:1]={a,b}'", RESCUED),
        ("'[2:2][3:4]={{a,b}}'", RESCUED),
        ("array[repeat('\"', 5000)]::text[]", '["' + '\\"' * 5000 + '"]'),
    ),
    _case("int[]", ("'{1,NULL,-3}'", "[1,null,-3]"), ("'{{1},{2}}'", RESCUED), ("'{}'", "[]")),
    _case("boolean[]", ("'{t,f,NULL}'", "[true,false,null]")),
    _case("float8[]", ("'{1.5,NULL,-2}'", "[1.5,null,-2.0]")),
    _case("numeric(5,2)[]", ("'{1.5,NULL}'", "[1.50,null]"), ("'{1.5,NaN}'", RESCUED)),
    _case("numeric[]", ("'{1.50,NULL,NaN}'", '["1.50",null,"NaN"]')),
    _case(
        "uuid[]",
        ("'{00000000-0000-0000-0000-000000000001}'", '["00000000-0000-0000-0000-000000000001"]'),
    ),
    _case("varchar(3)[]", ("'{abc,\"\"}'", '["abc",""]')),
    _case("char(3)[]", ("'{a}'", '["a  "]')),
    _texts("box[]", "'{(1,1),(0,0);(2,2),(1,1)}'"),
    _texts("int2vector", "'1 2 3'"),
]

G6 = [
    _texts(
        "json",
        "'null'",
        "null",
        """'{"b":1, "a" : 2,"b":3}'""",
        "'12345678901234567890.10'",
        r"""'{"x":"\u0000 \ud800"}'""",
        "E'[1,\\n 2]'",
    ),
    _texts("jsonb", "'null'", """'{"b":1,"a":2,"b":3}'""", "'12345678901234567890.10'", "null"),
]

G7 = [
    _texts("tsvector", "'a:1 b:2A'"),
    _texts("bit(3)", "B'101'"),
    _texts("varbit(1)", "B'1'", "B''"),
    _texts("macaddr8", "'08:00:2b:01:02:03:04:05'"),
    _texts("inet", "'10.0.0.1'", "'10.0.0.1/24'", "'::1'"),
    _texts("cidr", "'10.0.0.0/24'", "'10.0.0.1/32'"),
    _texts("pg_lsn", "'16/B374D848'"),
    _texts("uuid", "'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'"),
    _texts('"char"', "'x'", "''"),
    _texts("char(5)", "'ab'", "''"),
    _texts("name", "'n'"),
    _texts("int4range", "'[1,5)'", "'empty'"),
    _texts("nummultirange", "'{[1,2),(3,)}'"),
    _texts("point", "'(1.5,-2)'"),
    _texts("text", "''", "E'tab\\t and \\\\ and ''quote'' and \\n'", "'ü€😀'"),
]

G9 = [
    _case("small", ("1.5", "1.50"), ("'NaN'::numeric", RESCUED)),
    _case("smaller", ("-99.99", "-99.99")),
    _case("smaller[]", ("array[1.5, null]::smaller[]", "[1.50,null]")),
    _texts("mood", "'so so'", "'très bien'"),
    _case(
        "mood[]", ("""array['so so', '"quoted", {x}']::mood[]""", r'["so so","\"quoted\", {x}"]')
    ),
    _texts("other.mood", "'b c'"),
    _case("other.mood[]", ("array['a', 'b c']::other.mood[]", '["a","b c"]')),
    _texts("pair", "row(1, 'a,b')", "row(null, null)"),
    _case("pair[]", ("""array[row(1, 'a"b')::pair]""", r'["(1,\"a\"\"b\")"]')),
]

G10 = [
    _case(
        "bytea",
        (r"'\x'", ""),
        (r"'\x00'", "00"),
        (r"'\x5c5c78ff00'", "5C5C78FF00"),
        ("convert_to('plain', 'UTF8')", "706C61696E"),
    ),
    _case("bytea[]", (r"array['\x00', '\xff5c']::bytea[]", '["AA==","/1w="]')),
]

GROUPS = {
    "g1": G1,
    "g2": G2,
    "g3": G3,
    "g4": G4,
    "g5": G5,
    "g6": G6,
    "g7": G7,
    "g9": G9,
    "g10": G10,
}
