"""The code location with every capture of the defs folders.

The defs folders are `./defs`, which `pgcdc init` writes to; in a clone, `defs` at its root; and
`pgcdc_assets/defs` with the sample shop, in a clone and in a folder where the shop was started.
"""

import dagster as dg

from pgcdc_assets.orchestration.project.code_location import load_defs_folders
from pgcdc_assets.orchestration.project.home import defs_folders


@dg.definitions
def defs() -> dg.Definitions:
    """Load the defs folders, without a connection and without a JVM."""
    return load_defs_folders(defs_folders())
