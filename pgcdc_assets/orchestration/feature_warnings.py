"""Dagster's warnings of features in beta or preview.

Our own code and Dagster's uses such features; a user who loads definitions or runs a command can do
nothing about it.

One of them comes from Dagster alone: when it changes the attributes of check definitions, as it
does with those of components, they lose their class, and each code server gives it back to them,
with a warning. `checks_definition` gives it back where the warning is ignored.
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


def checks_definition(definition: dg.AssetsDefinition) -> dg.AssetChecksDefinition:
    """Make check definitions of what Dagster has made of them."""
    return dg.AssetChecksDefinition(**definition.get_attributes_dict())


@contextmanager
def without_feature_warnings() -> Iterator[None]:
    """Ignore them in a block, or in a function that is decorated with this."""
    with warnings.catch_warnings():
        ignore_feature_warnings()
        yield
