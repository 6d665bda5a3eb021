"""Dagster's warnings of features in beta or preview.

Our own code and Dagster's uses such features; a user who loads definitions or runs a command can do
nothing about it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg


def ignore_feature_warnings() -> None:
    """Ignore them from now on, in the whole process."""
    for category in (dg.BetaWarning, dg.PreviewWarning):
        warnings.simplefilter("ignore", category)


@contextmanager
def without_feature_warnings() -> Iterator[None]:
    """Ignore them in a block, or in a function that is decorated with this."""
    with warnings.catch_warnings():
        ignore_feature_warnings()
        yield
