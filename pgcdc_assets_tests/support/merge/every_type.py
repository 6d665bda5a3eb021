"""Every type that a column of a user's table can have, from `pg_type` of a server, with values."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import psycopg2
from psycopg2.extensions import connection as Connection

from pgcdc_assets_tests.support.merge.every_type_values import BASE_TYPES, WITHOUT_INPUT

# Random values of a base type, and values of a derived type.
DRAWN = 3
LIMIT = 24

# Types that users derive from other types.
CREATED = (
    "create type mood as enum ('so so', 'très bien', '\"quoted\", {x}', '')",
    'create schema "odd ""schema"',
    'create type "odd ""schema"."t,{}" as enum (\'a\', \'b c\')',
    "create domain small as numeric(6,2) check (value > -1000)",
    "create domain smaller as small check (value > -100)",
    "create domain moods as mood[]",
    "create type pair as (a int, b text)",
    "create type nested as (p pair, d date, m mood[], s small)",
    "create type textrange as range (subtype = text)",
    "create type smallrange as range (subtype = small)",
    "create table a_table (x int, y timestamptz[])",
)

# Columns whose type has a length or precision, and the Delta type if `pg_type` does not determine
# it.
DECLARED = (
    ("numeric(38,10)", "numeric"),
    ("numeric(50,20)", "numeric"),
    ("numeric(5,-2)", "numeric"),
    ("numeric(3,5)", "numeric"),
    ("numeric(9,0)[]", "numeric[]"),
    ("character varying(5)", "character varying"),
    ("character(5)", "character"),
    ("character(3)[]", "text[]"),
    ("bit(3)", "bit varying"),
    ("bit varying(5)", "bit varying"),
    ("timestamp(0) without time zone", "timestamp without time zone"),
    ("timestamp(3) with time zone", "timestamp with time zone"),
    ("time(3) without time zone", "time without time zone"),
    ("interval day to second(0)", "interval"),
)

# The hundred row types of catalogs and views are composites like any other type.
_TYPES = """
select t.oid::bigint, format_type(t.oid, null), t.typname, t.typtype::text, t.typdelim::text,
       n.nspname = 'pg_catalog', t.typbasetype::bigint, format_type(t.typbasetype, t.typtypmod),
       case when t.typoutput = 'array_out'::regproc then t.typelem::bigint else 0 end,
       coalesce(r.rngsubtype, m.rngtypid, 0)::bigint,
       array(select a.atttypid::bigint from pg_attribute a
              where a.attrelid = t.typrelid and a.attnum > 0 and not a.attisdropped
              order by a.attnum)
  from pg_type t
  join pg_namespace n on n.oid = t.typnamespace
  left join pg_type e on e.oid = t.typelem and t.typoutput = 'array_out'::regproc
  left join pg_class c on c.oid in (t.typrelid, e.typrelid)
  left join pg_range r on r.rngtypid = t.oid
  left join pg_range m on m.rngmultitypid = t.oid
 where t.typisdefined and t.typtype <> 'p' and e.typtype is distinct from 'p'
   and (c.oid is null or c.relkind = 'c'
        or n.nspname not in ('pg_catalog', 'information_schema', 'pg_toast'))
 order by t.oid
"""


@dataclass(frozen=True)
class SourceType:
    """A type of the server.

    Attributes:
        sql: the qualified name.
        kind: `pg_type.typtype`.
        declared_base: the base of a domain, with its length or precision.
        element: OID of an array's element; 0 for other types.
        subtype: OID of a range's subtype or of a multirange's range; 0 for other types.
        attributes: OIDs of the types of a composite's attributes.
    """

    oid: int
    sql: str
    name: str
    kind: str
    delimiter: str
    is_builtin: bool
    base: int
    declared_base: str
    element: int
    subtype: int
    attributes: tuple[int, ...]


@dataclass(frozen=True)
class TypeColumn:
    """A column of a type, with the texts of its values."""

    declared: str
    type: SourceType
    texts: tuple[str, ...]
    is_declared: bool = False

    def literal(self, row: int) -> str:
        """Return the SQL of the column's value in a row; NULL without values."""
        if not self.texts:
            return "null"
        return f"{quoted(self.texts[row % len(self.texts)])}::{self.declared}"


@dataclass
class Types:
    """The types of a database, and the texts of values that the server accepted.

    Attributes:
        refused: types whose input is not built into this server, such as xml without libxml.
    """

    connection: Connection
    rng: random.Random
    by_oid: Mapping[int, SourceType] = field(default_factory=dict)
    texts: dict[int, list[str]] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, connection: Connection, rng: random.Random) -> Types:
        """Read the types and find values of each.

        Raises:
            LookupError: a base type is unknown, or does not accept its values.
        """
        with connection.cursor() as cursor:
            cursor.execute("set search_path = pg_catalog")
            cursor.execute(_TYPES)
            found = [SourceType(*(*row[:-1], tuple(row[-1]))) for row in cursor]
        types = cls(connection, rng, {each.oid: each for each in found})
        unknown = sorted(
            each.sql
            for each in found
            if types._is_scalar(each) and each.name not in BASE_TYPES.keys() | WITHOUT_INPUT
        )
        if unknown:
            raise LookupError(f"no values are known of the types {', '.join(unknown)}")
        for each in found:
            types.values(each.oid)
        if types.problems:
            raise LookupError("; ".join(types.problems))
        return types

    def values(self, oid: int) -> list[str]:
        """Return the texts of a type's values, as the type's output function prints them."""
        if oid not in self.texts:
            self.texts[oid] = self._find_values(self.by_oid[oid])
        return self.texts[oid]

    def columns(self) -> list[TypeColumn]:
        """Return a column of each type, and the columns of `DECLARED`."""
        found = [
            TypeColumn(each.sql, each, tuple(self.values(each.oid)))
            for each in self.by_oid.values()
        ]
        by_name = {each.sql: each for each in self.by_oid.values()}
        for declared, base in DECLARED:
            texts = self.cast(self._literals(by_name[base].oid), declared)
            found.append(TypeColumn(declared, by_name[base], tuple(texts), is_declared=True))
        return found

    def cast(self, values: Sequence[str], declared: str) -> list[str]:
        """Return the texts of the values that a declared type can hold.

        Postgres prints a timestamp that was rounded beyond the last year, but does not read its
        text.
        """
        found = [text for value in values for text in self._shown(f"({value})::{declared}")]
        return [text for text in found if self._shown(f"{quoted(text)}::{declared}") == [text]]

    def _find_values(self, each: SourceType) -> list[str]:
        if self._is_scalar(each):
            return self._scalar_values(each)
        candidates = list(dict.fromkeys(self._derived(each)))
        if len(candidates) > LIMIT:
            candidates = self.rng.sample(candidates, LIMIT)
        return list(dict.fromkeys(self.cast(candidates, each.sql)))

    def _is_scalar(self, each: SourceType) -> bool:
        return each.kind == "b" and not each.element

    def _scalar_values(self, each: SourceType) -> list[str]:
        if each.name in WITHOUT_INPUT:
            assert not self._shown(f"''::{each.sql}"), f"{each.sql} has values"
            return []
        known = BASE_TYPES[each.name]
        inputs = list(known.edges)
        if known.draw is not None:
            inputs += [known.draw(self.rng) for _ in range(DRAWN)]
        found = []
        for value in inputs:
            texts = self._shown(f"{quoted(value)}::{each.sql}")
            if not texts and each.name not in self.refused:
                self.problems.append(f"{each.sql} does not accept {value[:200]!r}")
            found += texts
        return list(dict.fromkeys(found))

    def _derived(self, each: SourceType) -> list[str]:
        """Return SQL of values of a derived type."""
        if each.kind == "e":
            with self.connection.cursor() as cursor:
                cursor.execute(f"select unnest(enum_range(null::{each.sql}))::text")
                return [quoted(label) for (label,) in cursor]
        if each.kind == "d":
            # A domain of the information schema accepts only these two texts.
            return [*self._literals(each.base), "'YES'", "'NO'"]
        if each.element:
            return self._arrays(each)
        if each.kind == "c":
            columns = [self._literals(oid) or ["null"] for oid in each.attributes]
            rows = zip(*map(itertools.cycle, columns), strict=False)
            width = max(map(len, columns))
            return [f"row({', '.join(row)})" for row in [*itertools.islice(rows, width)][:6]] + [
                f"row({', '.join(['null'] * len(columns))})"
            ]
        below = self._literals(each.subtype)
        if each.kind == "m":
            return ["'{}'", *(f"{each.sql}({', '.join(p)})" for p in itertools.pairwise(below))]
        assert each.kind == "r", each
        return [
            "'empty'",
            *(f"{each.sql}(null, {value}, '()')" for value in below[-2:]),
            *(
                f"{each.sql}(least({a}, {b}), greatest({a}, {b}), '{bounds}')"
                for a, b in itertools.pairwise(below)
                for bounds in ("[)", "(]")
            ),
        ]

    def _arrays(self, each: SourceType) -> list[str]:
        """Write arrays: empty, with NULL, of two dimensions, with another lower bound, and so on.

        An array constructor would treat an element of type int2vector as an array.
        """
        items = [
            '"' + t.replace("\\", "\\\\").replace('"', '\\"') + '"'
            for t in self.values(each.element)
        ]
        literals = ["{}", "{NULL}"]
        between = self.by_oid[each.element].delimiter
        if items:
            literals.append("{" + between.join([*items, "NULL"]) + "}")
            literals.append("{" + items[-1] + "}")
            literals.append(f"{{{{{items[0]}}}{between}{{{items[-1]}}}}}")
            literals.append(f"[0:0]={{{items[-1]}}}")
        # Write each value separately, because a rescued value would rescue the whole array.
        literals += [f"{{{item}}}" for item in items]
        return [quoted(literal) for literal in literals]

    def _literals(self, oid: int) -> list[str]:
        return [f"{quoted(text)}::{self.by_oid[oid].sql}" for text in self.values(oid)]

    def _shown(self, expression: str) -> list[str]:
        """Return the text of a value; nothing if the server refuses the value."""
        try:
            with self.connection.cursor() as cursor:
                cursor.execute(f"select format('%s', {expression})")
                return [row[0] for row in cursor]
        except psycopg2.errors.FeatureNotSupported as error:
            if "requires the server to be built with libxml" in str(error):
                self.refused.add("xml")
            return []
        except psycopg2.Error:
            return []


def quoted(text: str) -> str:
    """Return a string literal of Postgres."""
    return "'" + text.replace("'", "''") + "'"
