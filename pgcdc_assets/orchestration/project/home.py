"""The default folders of a project, and its Dagster instance."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pgcdc_assets.errors import ConfigurationError, local_write_error
from pgcdc_assets.local import drafted
from pgcdc_assets.settings.storage import local_folder
from pgcdc_assets.settings.variables import check_variable_name

if TYPE_CHECKING:
    import dagster as dg

CONFIG = Path(__file__).with_name("dagster.yaml")

DSN_VARIABLE = "PGCDC_DSN"
SPARK_VARIABLE = "PGCDC_SPARK_REMOTE"
STATE_VARIABLE = "PGCDC_STATE"
# Value of the variable above for an embedded session, even if a server runs.
EMBEDDED_SPARK = "local"
EMBEDDED_DATABASE = "shop"

# Parameters that PGHOSTADDR, PGSSLMODE and so on would otherwise set, for another server.
_EMBEDDED_SERVER = (
    "host=127.0.0.1 hostaddr=127.0.0.1 sslmode=disable gssencmode=disable channel_binding=disable "
    "target_session_attrs=any"
)

# The files that declare components.
_FILE_NAMES = ("defs.yaml", "component.yaml")

_PACKAGE = Path(__file__).resolve().parents[2]


def clone_root() -> Path | None:
    """Return the folder of the git clone; None for an installed package."""
    root = _PACKAGE.parent
    return root if (root / "pyproject.toml").is_file() else None


def current_folder() -> Path:
    """Return the current folder.

    Raises:
        ConfigurationError: the current folder does not exist any more.
    """
    return local_folder(".", "The current folder")


def project_root() -> Path:
    """Return the parent folder of `.pgcdc`: the clone, else the current folder."""
    return clone_root() or current_folder()


def state_folder() -> Path:
    """Return the folder of the embedded server, the default lake and the default Dagster home.

    This is the folder of PGCDC_STATE, else `.pgcdc`.
    """
    given = os.environ.get(STATE_VARIABLE, "").strip()
    return local_folder(given, STATE_VARIABLE) if given else project_root() / ".pgcdc"


def embedded_data_folder() -> Path:
    """Return the data folder of the embedded server."""
    return state_folder() / "postgres"


def default_lake() -> Path:
    """Return the lake's folder if PGCDC_LAKE is not set."""
    return state_folder() / "lake"


def default_defs_folder() -> Path:
    """Return the folder into which `pgcdc init` writes component instances."""
    return current_folder() / "defs"


def defs_folders() -> list[Path]:
    """Return the folders from which component instances are loaded.

    These are `defs` of the current folder, `defs` of a clone, and the sample shop's folder in the
    package. The sample shop is included in a clone, and if it was started in the current folder.
    """
    folders = [default_defs_folder()]
    root = clone_root()
    if root is not None:
        folders.append(root / "defs")
    if root is not None or embedded_data_folder().is_dir():
        folders.append(_PACKAGE / "defs")
    return list(dict.fromkeys(folders))


def defs_files(folders: Sequence[Path]) -> list[Path]:
    """List the files below the folders that declare components."""
    return sorted(path for folder in folders for name in _FILE_NAMES for path in folder.rglob(name))


def conninfo(variable: str = DSN_VARIABLE) -> str:
    """Return the connection string of an environment variable, or of the embedded server.

    Args:
        variable: the value of the setting `dsn_env`.

    Raises:
        ConfigurationError: a variable other than PGCDC_DSN is not set, or its name is not valid, or
            the embedded server does not run.
    """
    check_variable_name(variable, "dsn_env")
    given = os.environ.get(variable, "").strip()
    if given:
        return given
    if variable != DSN_VARIABLE:
        raise ConfigurationError(
            reason=f"Environment variable {variable} is not set: it must hold the source's libpq "
            "URI"
        )
    return embedded_conninfo(embedded_data_folder())


def embedded_conninfo(data_dir: Path) -> str:
    """Find the embedded server's address in its postmaster.pid (port on the fourth line).

    Raises:
        ConfigurationError: the server does not run.
    """
    try:
        lines = (data_dir / "postmaster.pid").read_text().splitlines()
        port = int(lines[3])
    except (FileNotFoundError, IndexError, ValueError):
        raise ConfigurationError(
            reason=f"{DSN_VARIABLE} is not set, and the embedded Postgres in {data_dir} does not "
            f"run: set {DSN_VARIABLE} to your database's libpq URI, or start the sample shop with "
            "`python -m pgcdc_assets.demo dev`"
        ) from None
    return f"{_EMBEDDED_SERVER} port={port} dbname={EMBEDDED_DATABASE} user=postgres"


def prepare_home() -> Path:
    """Return DAGSTER_HOME, or create the default folder with its dagster.yaml.

    Raises:
        ConfigurationError: DAGSTER_HOME is not a folder, or the default folder cannot be written.
        TransientError: its disk is full.
    """
    given = os.environ.get("DAGSTER_HOME", "").strip()
    if given:
        home = local_folder(given, "DAGSTER_HOME") if given[0] == "~" else Path(given)
        if not home.is_absolute() or not home.is_dir():
            raise ConfigurationError(
                reason=f"DAGSTER_HOME is {given}, but must be the absolute path of an existing "
                "folder: create the folder, or unset the variable to use .pgcdc/dagster"
            )
        return home
    home = state_folder() / "dagster"
    try:
        home.mkdir(parents=True, exist_ok=True)
        if not (home / "dagster.yaml").exists():
            with drafted(home / "dagster.yaml") as draft:
                shutil.copyfile(CONFIG, draft)
    except OSError as error:
        remedy = f"set {STATE_VARIABLE} or DAGSTER_HOME to a folder that this user can write"
        raise local_write_error(f"The folder {home}", error, remedy) from error
    return home


@contextmanager
def open_instance() -> Iterator[dg.DagsterInstance]:
    """Open the instance of `prepare_home`.

    Raises:
        ConfigurationError: there is no such folder, its `dagster.yaml` is wrong, or its records
            cannot be read.
        TransientError: the storage of the records is not available.
    """
    # Import late: the import of Dagster takes seconds, and commands print progress before it.
    import dagster as dg
    import yaml
    from dagster_shared.check import CheckError

    from pgcdc_assets.orchestration.project.record_errors import explained_record_errors

    home = prepare_home()
    with explained_record_errors(home):
        try:
            opened = dg.DagsterInstance.from_config(str(home))
        except (dg.DagsterError, CheckError, ImportError, ValueError, yaml.YAMLError) as error:
            # Texts of Dagster and of YAML quote the file, which may have a password. --debug would
            # show the cause.
            raise ConfigurationError(
                reason=f"Dagster cannot read {home / 'dagster.yaml'} ({type(error).__name__}): "
                "correct the file, such as after `dagster instance info`, which shows what is wrong"
            ) from (error if isinstance(error, ImportError) else None)
        with opened as instance:
            yield instance
