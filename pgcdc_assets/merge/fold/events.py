"""Raw changes as events of keys: which row appears, changes or disappears at which position.

A NULL in a key that the settings name raises an error: in SQL, rows with NULL keys are distinct,
and a table with one row for each key cannot hold them.

An insert, an update or a row of a partial snapshot is a *content* of its key. A delete is the
*departure* of its key; an update that changes the key is both: the departure of the old key and a
content of the new one. The order is (commit_lsn, ordinal), and nothing else.

Columns of an events frame: `key_0`, `key_1` ... the typed key (and `key_rescued_0` ... where the
type cannot hold every text: the text that it could not), `commit_lsn`, `ordinal`, `commit_ts`,
`op`, `is_content`, `tuple` (the texts in the newest layout; NULL for a departure) and, where the
changes need it, `identity_0` ... (the texts of the other columns of the replica identity),
`unknown` (the fields that the change leaves out: unchanged TOAST), `is_arrival` and `is_move`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pyspark.sql import DataFrame

from pgcdc_assets.merge.change_stats import ChangeStats
from pgcdc_assets.merge.fold.table_schema import Layout, TableSchema
from pgcdc_assets.spark.sql import identifier, string

_COMMON = ("commit_lsn", "ordinal", "commit_ts", "op")

NULL_KEY = "pgcdc: NULL in a column of the configured key"


def null_key_sql(number: int) -> str:
    """Write the SQL of the error that a NULL in one of the key's columns raises.

    Args:
        number: the column's place in the key.
    """
    return f"CAST(raise_error({string(f'{NULL_KEY} {number};')}) AS STRING)"


@dataclass(frozen=True)
class Fold:
    """A table's schema together with the statistics of its changes."""

    schema: TableSchema
    stats: ChangeStats

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layouts of the changes."""
        return tuple(x for x in self.schema.layouts if x.version in self.stats.versions)

    @property
    def common_fields(self) -> tuple[int, ...]:
        """Indexes of the fields that every layout of the changes has."""
        width = range(len(self.schema.fields))
        return tuple(i for i in width if all(x.positions[i] is not None for x in self.layouts))

    @property
    def unchanged(self) -> tuple[int, ...]:
        """Indexes of the fields that are unchanged TOAST in a change."""
        found = set()
        for layout in self.layouts:
            positions = self.stats.unchanged.get(layout.version, set())
            found |= {i for i, p in enumerate(layout.positions) if p in positions}
        return tuple(sorted(found))

    @property
    def unknown(self) -> tuple[int, ...]:
        """Indexes of the fields that neither the new nor the old tuple of a change has."""
        return () if self.stats.is_full else self.unchanged

    @property
    def further_identity(self) -> tuple[int, ...]:
        """Indexes of the fields of the replica identity beyond the key.

        Empty if at most one row can have a key at any time, as far as the changes show: the key is
        the replica identity, nothing leaves a key, or whole old rows are counted (`latest.py`).
        """
        if self.stats.is_full or not self.stats.old_kinds - {None}:
            return ()
        identities = [layout.identity for layout in self.layouts if layout.identity]
        if not identities:
            return ()
        return tuple(sorted(frozenset.intersection(*identities).difference(self.schema.key)))

    @property
    def identity(self) -> tuple[int, ...]:
        """Indexes of the fields that identify a row at any time: the key and further fields."""
        return (*self.schema.key, *self.further_identity)

    @property
    def row_columns(self) -> tuple[str, ...]:
        """The columns of events that identify a row at any time."""
        further = range(len(self.further_identity))
        return (*self.key_columns, *(f"identity_{number}" for number in further))

    @property
    def kept(self) -> tuple[int, ...]:
        """Indexes of the dropped fields that some of the changes still have."""
        return tuple(
            i for i in self.schema.retained if any(x.positions[i] is not None for x in self.layouts)
        )

    @property
    def origin_columns(self) -> tuple[str, ...]:
        """The columns of events that tell the dropped fields of a change: its relation version."""
        return ("relation_version",) if self.kept else ()

    def has_field(self, index: int) -> str:
        """Write the SQL of whether an event, or a row of the table, has a dropped field."""
        if index not in self.kept:
            return "is_stored"
        having = [x.version for x in self.layouts if x.positions[index] is not None]
        return f"(is_stored OR relation_version IN ({', '.join(map(str, having))}))"

    @property
    def key_columns(self) -> tuple[str, ...]:
        """The columns of events that form the key."""
        return self.named("key", "key_rescued")

    def named(self, typed: str, rescued: str) -> tuple[str, ...]:
        """Name a column for each key field, and one more if its type may not hold the text."""
        names = []
        for number, index in enumerate(self.schema.key):
            names.append(f"{typed}_{number}")
            if self.schema.fields[index].type.may_rescue:
                names.append(f"{rescued}_{number}")
        return tuple(names)

    def key_values(self, text: Callable[[int], str]) -> list[str]:
        """Write the select expressions of `key_columns`, given the SQL of a field's text."""
        expressions = []
        for number, index in enumerate(self.schema.key):
            kind, given = self.schema.fields[index].type, text(index)
            if index in self.schema.nullable_key:
                given = f"coalesce({given}, {null_key_sql(number)})"
            value = kind.expression(given)
            expressions.append(f"{value} AS key_{number}")
            if kind.may_rescue:
                expressions.append(f"IF({value} IS NULL, {given}, NULL) AS key_rescued_{number}")
        return expressions

    def same_key(self, typed: str, rescued: str) -> str:
        """Write the SQL that a source row `s` and a row `t` of the table have the same key."""
        parts = []
        for number, index in enumerate(self.schema.key):
            field = self.schema.fields[index]
            name = identifier(field.name)
            if not field.type.may_rescue:
                parts.append(f"t.{name} = s.{typed}_{number}")
                continue
            text = f"try_element_at(t._rescued, {string(field.name)})"
            parts.append(f"t.{name} <=> s.{typed}_{number}")
            parts.append(f"{text} <=> s.{rescued}_{number}")
        return " AND ".join(parts)

    def stored_key(self) -> list[str]:
        """Write the select expressions of the key of a row of the table."""
        expressions = []
        for number, index in enumerate(self.schema.key):
            field = self.schema.fields[index]
            expressions.append(f"{identifier(field.name)} AS key_{number}")
            if field.type.may_rescue:
                text = f"try_element_at(_rescued, {string(field.name)})"
                expressions.append(f"{text} AS key_rescued_{number}")
        return expressions

    def old_text(self, index: int) -> str:
        """Write the SQL of a field's text in the old tuple."""
        return self._by_layout("old[{}]", index)

    def new_text(self, index: int) -> str:
        """Write the SQL of a field's text after the change, as far as the change has it."""
        text = self._by_layout("new[{}]", index)
        if index in self.unchanged:
            return f"IF({self.is_unchanged(index)}, {self.old_text(index)}, {text})"
        return text

    def known_text(self, index: int) -> str:
        """Write the SQL of a field's text in an event with the known values of `toast.py`."""
        return f"known_{index}.text" if index in self.unknown else f"tuple[{index}]"

    def compared_text(self, index: int) -> str:
        """Write the SQL of a field's text in `tuple` by which equal rows are found.

        Spark prints a real as a double otherwise than Postgres, such as 5.0 for 5.
        """
        text, columns = f"tuple[{index}]", self.schema.relation.columns
        is_double = index < len(columns) and columns[index].base_type == "float8"
        if is_double and any(index in layout.conversions for layout in self.layouts):
            return f"CAST(try_cast({text} AS DOUBLE) AS STRING)"
        return text

    def is_unchanged(self, index: int) -> str:
        """Write the SQL of whether the new tuple leaves a field out."""
        contains = self._by_layout("array_contains(unchanged, {})", index, of_text=False)
        return f"coalesce({contains}, false)"

    def is_unknown(self, index: int) -> str:
        """Write the SQL of whether neither tuple has the field.

        An old tuple of kind O is the whole row. An old tuple of kind K has the replica identity,
        and NULL in all other fields.
        """
        unchanged = self.is_unchanged(index)
        if index in self.identity:
            return f"({unchanged} AND old IS NULL)"
        return f"({unchanged} AND NOT old_kind <=> 'O')"

    def tuple_in_newest_layout(self) -> str:
        """Write the SQL of the new tuple with its texts in the order of the newest layout."""
        width = range(len(self.schema.fields))
        if not self.unchanged and self._is_newest_only():
            return "new"
        return f"array({', '.join(self.new_text(i) for i in width)})"

    def old_tuple_in_newest_layout(self) -> str:
        """Write the SQL of the old tuple with its texts in the order of the newest layout."""
        if self._is_newest_only():
            return "old"
        return f"array({', '.join(self.old_text(i) for i in range(len(self.schema.fields)))})"

    def _is_newest_only(self) -> bool:
        newest = tuple(range(len(self.schema.fields)))
        return all(x.positions == newest and not x.conversions for x in self.layouts)

    def _by_layout(self, template: str, index: int, *, of_text: bool = True) -> str:
        """Write the SQL of a field over tuples of several layouts. With two layouts it is

        (CASE relation_version WHEN 1 THEN new[2] WHEN 2 THEN new[1] END)

        Args:
            of_text: the template is the text of the field. Layouts without the field have its
                default; otherwise they have false.
        """
        missing = "false"
        if of_text:
            missing = self.schema.fields[index].default_sql or "CAST(NULL AS STRING)"

        def one(layout: Layout) -> str:
            position = layout.positions[index]
            if position is None:
                return missing
            value = template.format(position)
            convert = layout.conversions.get(index) if of_text else None
            return value if convert is None else convert(value)

        values = {layout.version: one(layout) for layout in self.layouts}
        if len(set(values.values())) == 1:
            return next(iter(values.values()))
        cases = " ".join(f"WHEN {version} THEN {value}" for version, value in values.items())
        return f"(CASE relation_version {cases} END)"


def build_events(changes: DataFrame, fold: Fold) -> DataFrame:
    """Turn a table's raw inserts, updates and deletes into events."""

    def key_text(index: int) -> str:
        return f"IF(op = 'D', {fold.old_text(index)}, {fold.new_text(index)})"

    def identity(text: Callable[[int], str]) -> list[str]:
        further = enumerate(fold.further_identity)
        return [f"{text(index)} AS identity_{number}" for number, index in further]

    own = [
        *fold.key_values(key_text),
        *identity(key_text),
        *_COMMON,
        *fold.origin_columns,
        "op <> 'D' AS is_content",
        f"IF(op = 'D', NULL, {fold.tuple_in_newest_layout()}) AS tuple",
    ]
    left = [
        *fold.key_values(fold.old_text),
        *identity(fold.old_text),
        *_COMMON,
        *fold.origin_columns,
        "false AS is_content",
        "CAST(NULL AS ARRAY<STRING>) AS tuple",
    ]
    key_changes = _key_changes(fold)
    if fold.unknown:
        unknown = ", ".join(f"IF({fold.is_unknown(i)}, {i}, NULL)" for i in fold.unknown)
        own.append(
            f"nullif(array_compact(array({unknown})), CAST(array() AS ARRAY<INT>)) AS unknown"
        )
        left.append("CAST(NULL AS ARRAY<INT>) AS unknown")
    if fold.unknown or fold.further_identity:
        own += [f"(op = 'I' OR {key_changes}) AS is_arrival", f"{key_changes} AS is_move"]
        left += ["false AS is_arrival", "false AS is_move"]
    # S: a row of a partial snapshot.
    events = changes.where("op IN ('I', 'U', 'D', 'S')").selectExpr(*own)
    if fold.stats.has_old_tuples:
        events = events.unionAll(changes.where(key_changes).selectExpr(*left))
    return events


def build_bag(changes: DataFrame, fold: Fold) -> DataFrame:
    """Turn changes with whole old rows into contents (rows added) and departures (removed)."""
    put_in = changes.where("op IN ('I', 'U')").selectExpr(
        *fold.key_values(fold.new_text),
        *_COMMON,
        *fold.origin_columns,
        "true AS is_content",
        f"{fold.tuple_in_newest_layout()} AS tuple",
    )
    taken_out = changes.where("op IN ('U', 'D')").selectExpr(
        *fold.key_values(fold.old_text),
        *_COMMON,
        *fold.origin_columns,
        "false AS is_content",
        f"{fold.old_tuple_in_newest_layout()} AS tuple",
    )
    return put_in.unionAll(taken_out)


def _key_changes(fold: Fold) -> str:
    """Write the SQL of whether an update gives its row another key or replica identity."""
    if not fold.stats.has_old_tuples:
        return "false"
    same = " AND ".join(f"{fold.old_text(i)} <=> {fold.new_text(i)}" for i in fold.identity)
    return f"(op = 'U' AND old_kind IS NOT NULL AND NOT ({same}))"
