"""Resolution of type OIDs to base types, through domains and arrays of domains.

Source: pg_type, Postgres documentation, chapter 51 System Catalogs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

    from pgcdc_assets.protocol.relation import Column

# The output function array_out identifies true arrays. Other types with typelem can be subscripted
# only (int2vector, name, point).
_TYPES = """
with recursive needed(oid) as (
    select unnest(%s::bigint[])::oid
    union
    select below.oid
      from needed
      join pg_type t on t.oid = needed.oid
     cross join lateral (values (t.typbasetype),
                                (case when t.typoutput = 'array_out'::regproc then t.typelem end)
                        ) below(oid)
     where below.oid <> 0
)
select t.oid::bigint, n.nspname, t.typname, t.typtype::text, t.typbasetype::bigint, t.typtypmod,
       case when t.typoutput = 'array_out'::regproc then t.typelem::bigint else 0 end,
       format_type(t.oid, null)
  from needed
  join pg_type t on t.oid = needed.oid
  join pg_namespace n on n.oid = t.typnamespace
"""


class _TypeRow(NamedTuple):
    oid: int
    schema: str
    name: str
    kind: str
    domain_base: int
    domain_typmod: int
    element: int
    formatted: str

    @property
    def qualified(self) -> str:
        return self.name if self.schema == "pg_catalog" else f"{self.schema}.{self.name}"


@dataclass(frozen=True, slots=True)
class ResolvedType:
    """A type with its base type below all domains. The fields have the meaning of `Column`.

    Attributes:
        base_typmod: the typmod of a domain; None if the column's typmod applies.
        element_typmod: the typmod of the element's domain; None if the array's typmod applies.
    """

    type: str
    kind: str
    base_type: str
    base_typmod: int | None = None
    element_type: str | None = None
    element_typmod: int | None = None

    def complete(self, column: Column) -> Column:
        """Return the column with its type fields filled in."""
        base_typmod = column.typmod if self.base_typmod is None else self.base_typmod
        element_typmod = -1
        if self.element_type is not None:
            element_typmod = base_typmod if self.element_typmod is None else self.element_typmod
        return replace(
            column,
            type=self.type,
            kind=self.kind,
            base_type=self.base_type,
            base_typmod=base_typmod,
            element_type=self.element_type,
            element_typmod=element_typmod,
        )


def resolve_types(conn: Connection, oids: Iterable[int]) -> dict[int, ResolvedType]:
    """Return the resolved types by OID, in one round trip. Unknown OIDs are missing."""
    wanted = sorted(set(oids))
    with conn.cursor() as cursor:
        cursor.execute(_TYPES, (wanted,))
        rows = {row[0]: _TypeRow(*row) for row in cursor}
    return {oid: _resolve(rows[oid], rows) for oid in wanted if oid in rows}


def _resolve(row: _TypeRow, rows: Mapping[int, _TypeRow]) -> ResolvedType:
    base, base_typmod = _below_domains(row, rows)
    if not base.element:
        return ResolvedType(row.formatted, base.kind, base.qualified, base_typmod)
    element, element_typmod = _below_domains(rows[base.element], rows)
    return ResolvedType(
        type=row.formatted,
        kind=element.kind,
        base_type=base.qualified,
        base_typmod=base_typmod,
        element_type=element.qualified,
        element_typmod=element_typmod,
    )


def _below_domains(row: _TypeRow, rows: Mapping[int, _TypeRow]) -> tuple[_TypeRow, int | None]:
    typmod: int | None = None
    while row.kind == "d":
        # Same rule as getBaseTypeAndTypmod() in src/backend/utils/cache/lsyscache.c: the typmod of
        # the innermost domain applies.
        typmod = row.domain_typmod
        row = rows[row.domain_base]
    return row, typmod
