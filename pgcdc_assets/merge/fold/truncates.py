"""The position of rows among the TRUNCATEs of a range, by binary search.

A range may have thousands of TRUNCATEs. Their LSNs, ordinals and times are one text each, which
Spark turns into a constant array before the query runs. So the number of expressions does not
depend on the number of TRUNCATEs, and each row needs as many comparisons as this number has bits.
For TRUNCATEs at (16, 0) and (48, 0), a row at (`lsn`, `ordinal`) comes after

    aggregate(array(2, 1), 0, (n, step) -> IF(lsns[n + step - 1] < lsn OR ..., n + step, n))

of them, where `lsns` is `CAST(split('16,48', ',') AS ARRAY<BIGINT>)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pgcdc_assets.merge.change_stats import Truncation


def count_before_sql(truncates: Sequence[Truncation], lsn: str = "lsn") -> str:
    """Write the SQL of the number of TRUNCATEs before a row; 0 for a row of the table.

    Args:
        truncates: in order.
        lsn: the column of the row's LSN.
    """
    if not truncates:
        return "0"
    steps = ", ".join(str(1 << bit) for bit in reversed(range(len(truncates).bit_length())))
    # Beyond the last TRUNCATE `get` returns NULL, and the condition is false.
    there = f"get({_constant(t.commit_lsn for t in truncates)}, n + step - 1)"
    ordinal = f"get({_constant(t.ordinal for t in truncates)}, n + step - 1)"
    is_before = f"{there} < {lsn} OR ({there} = {lsn} AND {ordinal} < ordinal)"
    search = f"aggregate(array({steps}), 0, (n, step) -> IF({is_before}, n + step, n))"
    return f"IF(is_stored, 0, {search})"


def next_truncate_sql(truncates: Sequence[Truncation], count: str) -> str:
    """Write the SQL of the first TRUNCATE after a row: a struct, or NULL.

    Args:
        truncates: in order.
        count: the column of the number of TRUNCATEs before the row.
    """
    lsn = f"get({_constant(t.commit_lsn for t in truncates)}, {count})"
    ordinal = f"get({_constant(t.ordinal for t in truncates)}, {count})"
    micros = f"get({_constant(map(_micros, truncates))}, {count})"
    found = _struct(lsn, ordinal, micros)
    return f"IF({count} < {len(truncates)}, {found}, NULL)"


def truncate_sql(truncate: Truncation) -> str:
    """Write the SQL of a TRUNCATE's position and time."""
    return _struct(f"{truncate.commit_lsn}L", f"{truncate.ordinal}L", f"{_micros(truncate)}L")


def _struct(lsn: str, ordinal: str, micros: str) -> str:
    return f"named_struct('lsn', {lsn}, 'ordinal', {ordinal}, 'ts', timestamp_micros({micros}))"


def _micros(truncate: Truncation) -> int:
    return round(truncate.commit_ts.timestamp() * 1_000_000)


def _constant(numbers: Iterable[int]) -> str:
    return f"CAST(split('{','.join(map(str, numbers))}', ',') AS ARRAY<BIGINT>)"
