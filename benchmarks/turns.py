"""The order of the sides of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")


def in_turns(sides: Mapping[str, Callable[[], T]], number: int) -> dict[str, T]:
    """Run all sides one after the other, and return their results.

    The order affects the results, because caches fill and clock rates change. So each repetition
    begins with another side.

    Args:
        number: number of the repetition, from 0, which determines the first side.
    """
    names = list(sides)
    begins = number % len(names)
    return {name: sides[name]() for name in names[begins:] + names[:begins]}
