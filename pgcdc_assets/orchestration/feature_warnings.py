"""Suppression of Dagster's warnings about beta and preview features.

Our code and Dagster's own code use such features. A user who loads definitions or runs a command
cannot avoid the warnings.

When Dagster changes attributes of check definitions, for example of a component, the definitions
lose their class. Each code server restores the class with a warning.
`checks_definition` restores the class while warnings are ignored.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg


def ignore_feature_warnings() -> None:
    """Ignore the warnings in the whole process, until its end."""
    for category in (dg.BetaWarning, dg.PreviewWarning):
        warnings.simplefilter("ignore", category)


def checks_definition(definition: dg.AssetsDefinition) -> dg.AssetChecksDefinition:
    """Restore the class of check definitions."""
    return dg.AssetChecksDefinition(**definition.get_attributes_dict())


@contextmanager
def without_feature_warnings() -> Iterator[None]:
    """Ignore the warnings in a block or in a decorated function."""
    with warnings.catch_warnings():
        ignore_feature_warnings()
        yield
