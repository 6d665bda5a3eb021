"""Which side of a comparison begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")


def in_turns(sides: Mapping[str, Callable[[], T]], number: int) -> dict[str, T]:
    """Run all sides one after the other; return what each gives.

    The machine is not the same for the one that begins and for the one that follows: caches fill,
    and clocks rise and fall. So each repetition begins with another side.

    Args:
        number: of the repetition, from 0; with each, the beginning moves by one side.
    """
    names = list(sides)
    begins = number % len(names)
    return {name: sides[name]() for name in names[begins:] + names[:begins]}
