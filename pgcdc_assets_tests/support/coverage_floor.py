"""Print the coverage of a test run, and fail if the coverage is below the floor: `make test`."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def main(path: str) -> int:
    """Read a report of slipcover in JSON; return 1 below the floor in `pyproject.toml`."""
    floor: float = tomllib.loads(PYPROJECT.read_text())["tool"]["pgcdc_assets_tests"][
        "coverage_floor"
    ]
    covered: float = json.loads(Path(path).read_text())["summary"]["percent_covered"]
    print(f"coverage of lines and branches: {covered:.1f} %, floor {floor} %")
    return 1 if covered < floor else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
