"""Values of every base type of Postgres and of its extensions: edge cases, and random ones.

A value is the text that the type's input function reads. Derived types (arrays, ranges, domains,
composites) use these values (`every_type.py`).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from pgcdc_assets_tests.support.merge.draw_values import (
    Draw,
    draw_bits,
    draw_box,
    draw_bytes,
    draw_clock,
    draw_date,
    draw_document,
    draw_double,
    draw_float,
    draw_hstore,
    draw_inet,
    draw_interval,
    draw_json,
    draw_lsn,
    draw_numeric,
    draw_point,
    draw_single,
    draw_small,
    draw_snapshot,
    draw_text,
    draw_word,
    draw_zone,
    drawing_hex,
    drawing_list,
    drawing_moment,
    drawing_whole,
)


@dataclass(frozen=True)
class Values:
    """The values of a base type.

    Attributes:
        edges: texts.
        draw: returns a random text; None for a type with few values.
    """

    edges: tuple[str, ...]
    draw: Draw | None = None


# Types whose input functions refuse every text. A user's column of these types has NULL or values
# that were copied from a system catalog.
WITHOUT_INPUT = frozenset(
    {
        "pg_node_tree",
        "pg_ndistinct",
        "pg_dependencies",
        "pg_mcv_list",
        "pg_brin_bloom_summary",
        "pg_brin_minmax_multi_summary",
        "gtsvector",
        "ghstore",
        "intbig_gkey",
        "ltree_gist",
        "box2df",
        "gidx",
    }
)

_TEXTS = (
    "",
    " ",
    "NULL",
    "null",
    "\\N",
    "\\x00",
    "a,b",
    'quoted "x"',
    "back\\slash",
    "{}",
    "()",
    "line\nbreak\r\n",
    "tab\tstop",
    "ü€😀",
    "'; --",
)

BASE_TYPES: Mapping[str, Values] = {
    "bool": Values(("true", "false")),
    "int2": Values(("-32768", "32767", "0"), drawing_whole(16)),
    "int4": Values(("-2147483648", "2147483647", "0"), drawing_whole(32)),
    "int8": Values(("-9223372036854775808", "9223372036854775807", "0"), drawing_whole(64)),
    "oid": Values(("0", "4294967295"), drawing_whole(32, is_signed=False)),
    "float4": Values(("NaN", "Infinity", "-Infinity", "-0", "3.4028235e38", "1e-45"), draw_single),
    "float8": Values(
        ("NaN", "Infinity", "-Infinity", "-0", "1.7976931348623157e308", "5e-324"), draw_double
    ),
    "numeric": Values(
        (
            "NaN",
            "Infinity",
            "-Infinity",
            "0",
            "0.00",
            "1.10",
            "-0.000000000001",
            "9" * 1000 + "." + "7" * 500,
            "9" * 131072,
            "-1e-16383",
        ),
        draw_numeric,
    ),
    "money": Values(
        ("-1234.56", "92233720368547758.07", "-92233720368547758.08", "0"), drawing_whole(50)
    ),
    "date": Values(
        (
            "infinity",
            "-infinity",
            "4713-01-01 BC",
            "0044-03-15 BC",
            "0001-01-01",
            "1582-10-10",
            "1970-01-01",
            "2000-02-29",
            "9999-12-31",
            "10000-01-01",
            "5874897-12-31",
        ),
        draw_date,
    ),
    "timestamp": Values(
        (
            "infinity",
            "-infinity",
            "4713-01-01 00:00:00 BC",
            "0001-01-01 00:00:00.000001",
            "1582-10-10 10:00",
            "9999-12-31 23:59:59.999999",
            "10000-01-01 00:00",
            "294276-12-31 23:59:59.999999",
            "1969-12-31 23:59:59.999999",
            "1999-12-31 24:00",
        ),
        drawing_moment(draw_clock),
    ),
    "timestamptz": Values(
        (
            "infinity",
            "-infinity",
            "0044-03-15 12:00:00+00 BC",
            "9999-12-31 23:59:59.999999+00",
            "9999-12-31 23:59:59-01",
            "0001-01-01 00:00:00+00",
            "0001-01-01 00:00:00+01",
            "2024-01-01 00:00:00+05:30",
            "2024-03-31 01:30:00 Europe/Berlin",
            "2024-10-27 02:30:00+02",
            "2024-10-27 02:30:00+01",
            "1880-01-01 00:00:00+00:19:32",
        ),
        drawing_moment(draw_clock, draw_zone),
    ),
    "time": Values(("00:00", "24:00", "23:59:59.999999"), draw_clock),
    "timetz": Values(
        ("00:00+00", "24:00+05:30", "10:00-15:59:59"), lambda rng: draw_clock(rng) + draw_zone(rng)
    ),
    "interval": Values(
        ("0", "-1 year +2 days -03:04:05.678", "178000000 years", "-1 mons +1 day"), draw_interval
    ),
    "text": Values(_TEXTS, draw_text),
    "varchar": Values(_TEXTS, draw_text),
    "bpchar": Values(("", "a", "x  ", "{,}"), draw_text),
    "name": Values(("", "n", "a" * 63, 'quoted "name"'), draw_word),
    "char": Values(("", "x", " ", "\\377")),
    "bytea": Values(("\\x", "\\x00", "\\x5c5c78ff00", "\\x" + "ff" * 3000), draw_bytes),
    "uuid": Values(
        ("A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11",),
        lambda rng: str(uuid.UUID(bytes=rng.randbytes(16))),
    ),
    "json": Values(
        (
            "null",
            '{"b":1, "a" : 2,"b":3}',
            "12345678901234567890.10",
            '{"x":"\\u0000 \\ud800"}',
            "[1,\n 2]",
            ' "\\u00fc" ',
            "1e400",
            '{"":[]}',
        ),
        draw_json,
    ),
    "jsonb": Values(
        (
            "null",
            '{"b":1, "a" : 2,"b":3}',
            "12345678901234567890.10",
            '"\\ud83d\\ude00"',
            "1e400",
            '{"":[{}]}',
        ),
        lambda rng: json.dumps(draw_document(rng)).replace("\\u0000", ""),
    ),
    "jsonpath": Values(("$", '$.a[*] ? (@.b > 1 && @.c == "x")')),
    "xml": Values(("<a>x</a>", "two <b/>", "<?xml version='1.0'?><a b=\"&amp;\"/>")),
    "tsvector": Values(("", "a:1 b:2A", "'it''s':1 'b c':2"), draw_word),
    "tsquery": Values(("a & !b | c <-> d", "'it''s':*A"), draw_word),
    "bit": Values(("1", "0"), lambda rng: rng.choice("01")),
    "varbit": Values(("", "1", "0" * 100), draw_bits),
    "macaddr": Values(("08:00:2b:01:02:03",), drawing_hex(6)),
    "macaddr8": Values(("08:00:2b:01:02:03:04:05",), drawing_hex(8)),
    "inet": Values(
        ("10.0.0.1", "10.0.0.1/24", "::1", "::ffff:1.2.3.4/128", "0.0.0.0/0"), draw_inet
    ),
    "cidr": Values(("10.0.0.0/24", "10.0.0.1/32", "::/0", "2001:db8::/32")),
    "point": Values(("(1.5,-2)", "(NaN,Infinity)", "(0,-0)"), draw_point),
    "line": Values(("{1,2,3}", "{0,-1,0.1}"), drawing_list("{1,", draw_float, "}", 2)),
    "lseg": Values(("[(0,0),(1,1.5)]",), drawing_list("[", draw_point, "]", 2)),
    "box": Values(("(1,1),(0,0)", "(-1,5),(2,2)"), draw_box),
    "path": Values(("[(0,0),(1,1)]", "((0,0),(1,1),(2,0))"), drawing_list("[", draw_point, "]", 3)),
    "polygon": Values(("((0,0),(1,1),(2,0))",), drawing_list("(", draw_point, ")", 4)),
    "circle": Values(("<(1,2),3>", "<(0,0),0>"), lambda rng: f"<{draw_point(rng)},{rng.random()}>"),
    "pg_lsn": Values(("0/0", "16/B374D848", "FFFFFFFF/FFFFFFFF"), draw_lsn),
    "pg_snapshot": Values(("10:20:10,14,15", "1:1:"), draw_snapshot),
    "txid_snapshot": Values(("10:20:10,14,15", "1:1:"), draw_snapshot),
    "xid": Values(("0", "4294967295"), drawing_whole(32, is_signed=False)),
    "xid8": Values(("0", "18446744073709551615"), drawing_whole(64, is_signed=False)),
    "cid": Values(("0", "4294967295"), drawing_whole(32, is_signed=False)),
    "tid": Values(("(0,0)", "(4294967295,65535)"), lambda rng: f"({drawing_whole(32)(rng)[:1]},7)"),
    "int2vector": Values(("", "1 2 3", "-32768")),
    "oidvector": Values(("", "1 2 4294967295")),
    "refcursor": Values(_TEXTS, draw_text),
    "aclitem": Values(("=r/postgres", "postgres=arwd*/postgres")),
    "regclass": Values(("pg_class", "-", "public.a_table", "99999")),
    "regcollation": Values(('"C"', "-")),
    "regconfig": Values(("simple", "english")),
    "regdictionary": Values(("simple",)),
    "regnamespace": Values(("pg_catalog", '"odd ""schema"', "-")),
    "regoper": Values(("||/", "0")),
    "regoperator": Values(("+(integer,integer)", "!!(none,tsquery)", "0")),
    "regproc": Values(("now", "-")),
    "regprocedure": Values(("abs(numeric)", "-")),
    "regrole": Values(("postgres", "-")),
    "regtype": Values(("integer", "timestamp with time zone", "text[]", "-")),
    # pgvector
    "vector": Values(
        ("[1]", "[1,-2.5,3e-30]", "[0,-0,3.4028235e38]"), drawing_list("[", draw_small, "]", 5)
    ),
    "halfvec": Values(
        ("[1]", "[1,-2.5,65504]", "[0,-0,6e-8]"), drawing_list("[", draw_small, "]", 5)
    ),
    "sparsevec": Values(("{1:1,3:2.5}/5", "{}/1"), lambda rng: f"{{{rng.randrange(1, 9)}:1.5}}/9"),
    # contrib
    "hstore": Values(
        ("", 'a=>1, "b c"=>NULL, "d"=>"\\"=>,"', '""=>"", "NULL"=>"NULL", "\\\\"=>"\\\\"'),
        draw_hstore,
    ),
    "citext": Values(_TEXTS, draw_text),
    "ltree": Values(
        ("", "Top.Science", "a.b_c.1"), lambda rng: f"{draw_word(rng)}.{draw_word(rng)}"
    ),
    "lquery": Values(("*.a{1,2}.!b|c*@",)),
    "ltxtquery": Values(("a & b*@ | !c",)),
    "cube": Values(("(1,2),(3,4)", "(1)", "0", "(NaN)"), drawing_list("(", draw_float, ")", 3)),
    "seg": Values(("1 .. 2", "~5.0", "3(+-)1", "<7")),
    "query_int": Values(("1&(2|!3)",)),
    "ean13": Values(("978-0-393-04002-9",)),
    "isbn13": Values(("978-0-393-04002-9",)),
    "isbn": Values(("0-393-04002-X",)),
    "ismn13": Values(("979-0-060-11561-5",)),
    "ismn": Values(("M-060-11561-5",)),
    "issn13": Values(("977-1436-452-00-8",)),
    "issn": Values(("1436-4522",)),
    "upc": Values(("220356483481",)),
    # PostGIS
    "geometry": Values(
        (
            "POINT EMPTY",
            "POINT(1 2)",
            "SRID=4326;POINT(1.5 -2)",
            "POINT Z (1 2 3)",
            "POINT M (1 2 3)",
            "SRID=3857;LINESTRING ZM (0 0 1 2, 3 4 5 6)",
            "POLYGON((0 0,4 0,4 4,0 4,0 0),(1 1,2 1,2 2,1 1))",
            "GEOMETRYCOLLECTION(POINT(1 2))",
        ),
        lambda rng: f"SRID=4326;POINT({draw_float(rng)} {draw_float(rng)})",
    ),
    "geography": Values(
        ("POINT(1 2)", "SRID=4326;LINESTRING Z (0 0 1, 2 3 4)"),
        lambda rng: f"POINT({rng.uniform(-180, 180)} {rng.uniform(-90, 90)})",
    ),
    "box2d": Values(("BOX(0 0,1 1.5)",)),
    "box3d": Values(("BOX3D(0 0 0,1 1 1)",)),
    "spheroid": Values(('SPHEROID["WGS 84",6378137,298.257223563]',)),
}
