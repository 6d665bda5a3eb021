"""The key of a merge, as SQL over the rows of an SCD table.

A typed key column may be unable to hold a value: Spark's date has no infinity. Then the column is
NULL, its text is in `_rescued`, and both together are the key, as in the merge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pgcdc_assets.spark.sql import WHOLE_NUMBER_BITS, between_sql, identifier, string

# Types of `merge/fold/types.py` that hold every value of Postgres.
_COMPLETE = frozenset({"string", "boolean", "smallint", "int", "bigint", "float", "double"})


@dataclass(frozen=True)
class MergeKey:
    """The merge key of one SCD table.

    Attributes:
        types: the Spark type of each column of the table.
    """

    names: tuple[str, ...]
    types: Mapping[str, str]

    @property
    def aliases(self) -> tuple[str, ...]:
        """Names of the parts in the SQL: `k0`, `r0` (if the value may be rescued), `k1` ..."""
        return tuple(alias for alias, _ in self._parts())

    @property
    def listed(self) -> str:
        """The aliases as a list for PARTITION BY and GROUP BY."""
        return ", ".join(self.aliases)

    def expressions(self) -> list[str]:
        """Write the select expressions of the parts over the table's rows."""
        return [f"{sql} AS {alias}" for alias, sql in self._parts()]

    def lacks_value(self) -> str:
        """Write the SQL over the table's rows that a column of the key has neither value nor text.

        Only a row that was deleted before the table got this key may have none.
        """
        return " OR ".join(
            f"({identifier(name)} IS NULL AND try_element_at(_rescued, {string(name)}) IS NULL)"
            for name in self.names
        )

    def same(self, one: str, other: str) -> str:
        """Write the SQL condition that rows of two relations have the same key."""
        return " AND ".join(f"{one}.{alias} <=> {other}.{alias}" for alias in self.aliases)

    @property
    def bounded(self) -> tuple[str, ...]:
        """The aliases of the parts that have bounds."""
        return tuple(f"key_{n}" for n in self._whole_numbers())

    def bounds(self, counts: str = "true") -> list[str]:
        """Write the aggregates over the parts that `within` needs.

        Args:
            counts: SQL condition of the rows that count; the parts of other rows are NULL.
        """
        aggregates = []
        for n in self._whole_numbers():
            unknown = f"count_if({counts} AND key_{n} IS NULL) AS unknown_{n}"
            aggregates += [f"min(key_{n}) AS least_{n}", f"max(key_{n}) AS most_{n}", unknown]
        return aggregates

    def bounds_of_groups(self) -> list[str]:
        """Write the aggregates over groups whose aggregates are those of `bounds`."""
        aggregates = []
        for n in self._whole_numbers():
            unknown = f"sum(unknown_{n}) AS unknown_{n}"
            aggregates += [f"min(least_{n}) AS least_{n}", f"max(most_{n}) AS most_{n}", unknown]
        return aggregates

    def within(self, found: Mapping[str, object]) -> str:
        """Write the SQL condition that a row of the table may have one of the aggregated keys.

        The bounds are literals, so that Delta skips files without such keys.
        """
        parts = []
        for n, name in self._whole_numbers().items():
            if found[f"unknown_{n}"] == 0:
                least, most = found[f"least_{n}"], found[f"most_{n}"]
                parts.append(between_sql(identifier(name), least, most, self.types[name]))
        return " AND ".join(parts) or "true"

    def _parts(self) -> list[tuple[str, str]]:
        parts = []
        for number, name in enumerate(self.names):
            parts.append((f"key_{number}", identifier(name)))
            if self.types[name] not in _COMPLETE:
                text = f"try_element_at(_rescued, {string(name)})"
                parts.append((f"key_rescued_{number}", text))
        return parts

    def _whole_numbers(self) -> dict[int, str]:
        return {
            n: name
            for n, name in enumerate(self.names)
            if self.types[name].upper() in WHOLE_NUMBER_BITS
        }
