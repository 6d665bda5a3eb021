"""The command line's Dagster instance: DAGSTER_HOME's, or one below `.pgcdc/dagster`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dagster as dg

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.orchestration import home as defaults

CONFIG = Path(__file__).with_name("dagster.yaml")


def prepare_home() -> Path:
    """Return DAGSTER_HOME, or make the default one with its dagster.yaml.

    Raises:
        ConfigurationError: DAGSTER_HOME is set and is no folder.
    """
    given = os.environ.get("DAGSTER_HOME", "").strip()
    if given:
        home = Path(given).expanduser()
        if not home.is_absolute() or not home.is_dir():
            raise ConfigurationError(
                reason=f"DAGSTER_HOME is {given}, which is not an existing folder given by its "
                "absolute path: make it, or unset the variable to use .pgcdc/dagster"
            )
        return home
    home = defaults.state_folder() / "dagster"
    home.mkdir(parents=True, exist_ok=True)
    if not (home / "dagster.yaml").exists():
        shutil.copyfile(CONFIG, home / "dagster.yaml")
    return home


@contextmanager
def open_instance() -> Iterator[dg.DagsterInstance]:
    """Open the instance of `prepare_home`."""
    home = prepare_home()
    with dg.DagsterInstance.from_config(str(home)) as instance:
        yield instance
