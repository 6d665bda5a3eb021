"""Commands of `pgcdc` in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys


def pgcdc(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command with further variables of the environment; its exit status may be any."""
    return subprocess.run(
        [sys.executable, "-m", "pgcdc_assets.cli", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
