"""The code location: every capture declared in the defs folder.

In a clone that folder is `pgcdc_assets/defs`; for an installed package it is `./defs`, where `pgcdc
init` writes.
"""

import dagster as dg

from pgcdc_assets.orchestration.defaults import default_defs_folder
from pgcdc_assets.orchestration.loading import load_defs_folder


@dg.definitions
def defs() -> dg.Definitions:
    """Load the defs folder; nothing connects and nothing starts."""
    return load_defs_folder(default_defs_folder())
