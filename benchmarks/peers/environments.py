"""Separate environments of other tools, below `.pgcdc/peers`.

An environment is created once for its pinned requirements, and kept.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.environment import ROOT
from benchmarks.source import log
from pgcdc_assets.demo.programs import find_binaries

FOLDER = ROOT / ".pgcdc" / "peers"
_SHOWN_OUTPUT = 300


class UnavailableError(Exception):
    """The tool is not available on this machine. The table shows the message as the reason."""


def make_venv(name: str, version: str | None = None) -> Path:
    """Create a virtual environment with pinned packages; return the folder of its programs.

    Args:
        name: the tool's name; `requirements/<name>.txt` has all packages of its environment.
        version: the version of Python, such as "3.9"; None: the version of this process.

    Raises:
        UnavailableError: this Python is not installed, or a package cannot be installed.
    """
    python = sys.executable if version is None else _find_python(version)
    requirements = Path(__file__).parent / "requirements" / f"{name}.txt"
    folder, wanted = FOLDER / name, f"{python}\n{requirements.read_text()}"
    made_of = folder / "made_of.txt"
    if not made_of.exists() or made_of.read_text() != wanted:
        log(f"{name}: installing its packages")
        shutil.rmtree(folder, ignore_errors=True)
        run_to_prepare([python, "-m", "venv", str(folder)])
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        run_to_prepare([*pip, "--disable-pip-version-check", "-r", str(requirements)])
        made_of.write_text(wanted)
    return folder / "bin"


def build_crate(name: str, source: Path) -> Path:
    """Build a crate of this repository with the versions of its Cargo.lock; return the program.

    Raises:
        UnavailableError: cargo is not installed, or the build fails.
    """
    target = FOLDER / name
    manifest = source / "Cargo.toml"
    command = ["cargo", "build", "--quiet", "--release", "--locked", "--manifest-path"]
    log(f"{name}: cargo build")
    run_to_prepare([*command, str(manifest), "--target-dir", str(target)])
    return target / "release" / f"peer_{name}"


def find_wal2json(version: int) -> Path | None:
    """Find wal2json for Debian's Postgres, or download its package without an installation.

    Returns:
        The library; None if it is installed where the server finds it.

    Raises:
        UnavailableError: the package is not available.
    """
    if (find_binaries(version).parent / "lib" / "wal2json.so").exists():
        return None
    folder = FOLDER / "wal2json"
    library = folder / "usr" / "lib" / "postgresql" / str(version) / "lib" / "wal2json.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        package = f"postgresql-{version}-wal2json"
        run_to_prepare(["apt-get", "--quiet", "download", package], folder)
        for archive in folder.glob(f"{package}_*.deb"):
            run_to_prepare(["dpkg", "-x", str(archive), str(folder)])
    return library


def run_to_prepare(command: Sequence[str], folder: Path | None = None) -> str:
    """Run a command that prepares an environment; return its output.

    Raises:
        UnavailableError: the command is not installed or failed.
    """
    try:
        done = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
    except OSError as error:
        raise UnavailableError(f"{command[0]} is not installed") from error
    if done.returncode != 0:
        said = shorten(done.stderr.strip() or done.stdout.strip())
        raise UnavailableError(f"{Path(command[0]).name} failed: {said}")
    return done.stdout.strip()


def shorten(said: str) -> str:
    """Return the end of a program's output as one line, without addresses and folders."""
    line = " ".join(said.split())
    for pattern, shown in (
        (r"\b\w+://\S+", "(URL)"),
        (rf"({re.escape(str(FOLDER))}|{re.escape(tempfile.gettempdir())})\S*", "(path)"),
        (r"(https?:)?\b[\w.-]+\.(org|com|io)\b\S*", "(host)"),
    ):
        line = re.sub(pattern, shown, line)
    return line[-_SHOWN_OUTPUT:]


def _find_python(version: str) -> str:
    """Find an interpreter by its version, in PATH or in pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = sorted(pyenv.glob(f"versions/{version}.*/bin/python"))
    candidates = [shutil.which(f"python{version}"), *map(str, reversed(found))]
    for candidate in candidates:
        # A shim of pyenv exists for versions that are not selected, and fails.
        if candidate and subprocess.run([candidate, "-V"], capture_output=True).returncode == 0:
            return candidate
    raise UnavailableError(f"needs Python {version}, and {platform.python_version()} is installed")
