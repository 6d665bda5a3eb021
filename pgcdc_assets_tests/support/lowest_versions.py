"""Print the lower bounds of setup.cfg as a constraints file: `make test-lowest`.

The module needs only Python, because it runs before the installation of packages.
"""

from __future__ import annotations

import configparser
import re
from collections.abc import Mapping
from pathlib import Path

SETUP = Path(__file__).resolve().parents[2] / "setup.cfg"

_LOWER_BOUND = re.compile(r"([\w.-]+)(?:\[[\w,]+\])?(?:==|~=|>=)([\w.]+)")


def requirements(extra: str | None = None) -> list[str]:
    """Return the requirements of the package, or of an extra."""
    setup = configparser.ConfigParser()
    setup.read(SETUP)
    listed = (
        setup["options"]["install_requires"]
        if extra is None
        else setup["options.extras_require"][extra]
    )
    return listed.split("\n")[1:]


def lowest_versions() -> Mapping[str, str]:
    """Return the lowest supported version of each requirement of users.

    Raises:
        ValueError: a requirement has no lower bound.
    """
    lowest = {}
    for requirement in [*requirements(), *requirements("demo")]:
        bound = _LOWER_BOUND.match(requirement)
        if bound is None:
            raise ValueError(f"{requirement} has no lower bound")
        lowest[bound[1]] = bound[2]
    return lowest


if __name__ == "__main__":
    for name, version in lowest_versions().items():
        print(f"{name}=={version}")
