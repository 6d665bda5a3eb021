"""Equality of values of all types of small tables, against the values' own texts."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from pgcdc_assets.merge.batch.equal_values import is_same

Draw = Callable[[random.Random], Any]

_COUNT = 2_000


def _list_of(draw: Draw) -> Draw:
    return lambda rng: [_maybe(draw, rng) for _ in range(rng.randrange(3))]


def _map(rng: random.Random) -> list[tuple[str, str | None]]:
    names = rng.sample("ab", rng.randrange(3))
    return [(name, rng.choice(["x", "y", None])) for name in names]


def _maybe(draw: Draw, rng: random.Random) -> Any:
    return None if rng.random() < 0.2 else draw(rng)


def _float(rng: random.Random) -> float:
    return rng.choice([0.0, -0.0, 1.5, float("nan"), float("inf")])


_TYPES: dict[str, tuple[pa.DataType, Draw]] = {
    "bool": (pa.bool_(), lambda rng: rng.random() < 0.5),
    "int": (pa.int64(), lambda rng: rng.randrange(2)),
    "double": (pa.float64(), _float),
    "float": (pa.float32(), _float),
    "decimal": (pa.decimal128(10, 2), lambda rng: Decimal(rng.choice(["0.00", "1.50"]))),
    "text": (pa.string(), lambda rng: rng.choice(["", "a", "A"])),
    "binary": (pa.binary(), lambda rng: rng.choice([b"", b"\x00"])),
    "date": (pa.date32(), lambda rng: rng.choice([dt.date(1, 1, 1), dt.date(2024, 2, 29)])),
    "list": (pa.list_(pa.int32()), _list_of(lambda rng: rng.randrange(2))),
    "list of floats": (pa.list_(pa.float64()), _list_of(_float)),
    "list of lists": (pa.list_(pa.list_(pa.string())), _list_of(_list_of(lambda _: "a"))),
    "map": (pa.map_(pa.string(), pa.string()), _map),
}


@pytest.mark.parametrize("name", _TYPES)
def test_values_are_equal_exactly_if_their_texts_are(name: str, rng: random.Random) -> None:
    kind, draw = _TYPES[name]
    left, right = (pa.array([_maybe(draw, rng) for _ in range(_COUNT)], kind) for _ in range(2))
    wanted = [repr(a) == repr(b) for a, b in zip(left.to_pylist(), right.to_pylist(), strict=True)]
    assert is_same(left, right).tolist() == wanted
    assert 0 < sum(wanted) < _COUNT
    # A part of an array has offsets that do not begin at zero.
    assert is_same(left.slice(700, 900), right.slice(700, 900)).tolist() == wanted[700:1_600]


@pytest.mark.parametrize("name", _TYPES)
def test_nothing_and_nulls_alone_can_be_compared(name: str) -> None:
    kind, _ = _TYPES[name]
    assert is_same(pa.array([], kind), pa.array([], kind)).tolist() == []
    assert is_same(pa.nulls(2, kind), pa.nulls(2, kind)).tolist() == [True, True]
