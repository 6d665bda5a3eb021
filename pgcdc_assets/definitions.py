"""The code location: every capture declared in the defs folders.

That is `./defs`, where `pgcdc init` writes; in a clone, `defs` at its root; and the sample shop in
`pgcdc_assets/defs`, in a clone and in a folder where the shop was started.
"""

import dagster as dg

from pgcdc_assets.orchestration.project.code_location import load_defs_folders
from pgcdc_assets.orchestration.project.home import defs_folders


@dg.definitions
def defs() -> dg.Definitions:
    """Load the defs folders; nothing connects and nothing starts."""
    return load_defs_folders(defs_folders())
