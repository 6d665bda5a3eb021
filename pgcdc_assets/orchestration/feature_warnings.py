"""Suppression of Dagster's warnings about beta and preview features.

Our code and Dagster's own code use such features. A user who loads definitions or runs a command
cannot avoid the warnings.

When Dagster changes attributes of check definitions, for example of a component, the definitions
lose their class. Each code server restores the class with a warning. `ChecksDefinition` keeps its
class, so that a component tree of the user causes no warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dagster as dg


def ignore_feature_warnings() -> None:
    """Ignore the warnings in the whole process, until its end."""
    for category in (dg.BetaWarning, dg.PreviewWarning):
        warnings.simplefilter("ignore", category)


@contextmanager
def without_feature_warnings() -> Iterator[None]:
    """Ignore the warnings in a block or in a decorated function."""
    with warnings.catch_warnings():
        ignore_feature_warnings()
        yield


class ChecksDefinition(dg.AssetChecksDefinition):
    """Check definitions that keep their class when Dagster changes attributes."""

    @staticmethod
    def dagster_internal_init(**attributes: Any) -> ChecksDefinition:
        """Build changed definitions. Dagster calls this method of the class of the original."""
        with without_feature_warnings():
            return ChecksDefinition(**attributes)
