"""The captures of a code location: in YAML files of a defs folder, or in a Python module."""

from __future__ import annotations

import importlib
import re
import sys
import traceback
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import dagster as dg
from dagster.components.resolved.errors import ResolutionException
from dagster_shared.record import replace
from pydantic import ValidationError

from pgcdc_assets.error_text import first_line
from pgcdc_assets.errors import ConfigurationError, PgcdcError
from pgcdc_assets.orchestration.feature_warnings import (
    without_feature_warnings,
)
from pgcdc_assets.orchestration.names import Names
from pgcdc_assets.orchestration.project.defs_file import check_defs_folders
from pgcdc_assets.orchestration.project.home import current_folder
from pgcdc_assets.orchestration.resources import (
    LakeResource,
    PostgresResource,
    SparkResource,
    open_resources,
)
from pgcdc_assets.orchestration.settings_metadata import CAPTURE_METADATA, read_capture_settings
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings import CdcCapture

# Errors about names and definitions. The texts of other errors may quote values, such as passwords.
_SHOWN = (
    AttributeError,
    ImportError,
    KeyError,
    NameError,
    SyntaxError,
    dg.DagsterInvalidDefinitionError,
)

DEFAULT_MODULE = "pgcdc_assets.definitions"


@dataclass(frozen=True)
class LoadedCapture:
    """A capture of a code location, with its resources."""

    capture: CdcCapture
    raw: dg.AssetKey
    postgres: PostgresResource
    lake: LakeResource
    spark: SparkResource

    @property
    def zone(self) -> RawZone:
        """The raw zone of the capture."""
        return self.lake.zone(self.capture.name)


@dataclass(frozen=True)
class CodeLocation:
    """The definitions of a module, and the captures in them."""

    definitions: dg.Definitions
    captures: Mapping[str, LoadedCapture]

    @property
    def repository(self) -> dg.RepositoryDefinition:
        """The repository of the jobs and sensors."""
        with without_feature_warnings():
            return self.definitions.get_repository_def()

    def select(self, name: str | None) -> list[LoadedCapture]:
        """Return the named capture, or all captures.

        Raises:
            ConfigurationError: no capture is declared, or no capture has the name.
        """
        known = ", ".join(sorted(self.captures)) or "none"
        if name is None:
            if not self.captures:
                raise ConfigurationError(
                    reason="No capture is declared: write one with `pgcdc init --name NAME "
                    "--publication PUBLICATION`"
                )
            return [self.captures[key] for key in sorted(self.captures)]
        if name not in self.captures:
            raise ConfigurationError(reason=f"There is no capture named {name}; known: {known}")
        return [self.captures[name]]


@without_feature_warnings()
def load_defs_folders(folders: Sequence[Path]) -> dg.Definitions:
    """Load every component below the folders. A folder may be missing.

    Raises:
        ConfigurationError: a component cannot be loaded, or two captures have the same name.
    """
    there = [folder for folder in folders if folder.is_dir()]
    check_defs_folders(there)
    loaded = [_load(folder) for folder in there]
    # Definitions keep the component tree of their folder, and Dagster cannot merge two trees.
    return dg.Definitions.merge(
        *loaded[:1], *(replace(definitions, component_tree=None) for definitions in loaded[1:])
    )


def _load(folder: Path) -> dg.Definitions:
    tree = dg.ComponentTree(defs_module=_module_of(folder), project_root=folder.parent)
    try:
        return tree.build_defs()
    except Exception as error:
        explained, may_be_shown = _explained(folder, error)
        raise explained from (error if may_be_shown else None)


@without_feature_warnings()
def load_location(
    module_name: str = DEFAULT_MODULE, instance: dg.DagsterInstance | None = None
) -> CodeLocation:
    """Import a module and read its definitions.

    Args:
        instance: as in `find_captures`.

    Raises:
        ConfigurationError: the import fails, the module has no definitions, or they cannot be
            loaded, or a resource reads an environment variable that is not set.
    """
    here = str(current_folder())
    if "" not in sys.path and here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            reason=f"Module {module_name} cannot be imported: {error}. Name a Dagster code "
            "location with -m, and start the command in a folder from which Python finds the module"
        ) from error
    except PgcdcError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigurationError(
            reason=f"Module {module_name} cannot be imported: {_reason(error)}"
        ) from error
    try:
        definitions = _definitions_of(module)
        return CodeLocation(definitions, find_captures(definitions, instance))
    except PgcdcError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigurationError(
            reason=f"The definitions of module {module_name} cannot be loaded: {_reason(error)}"
        ) from error


def find_captures(
    definitions: dg.Definitions, instance: dg.DagsterInstance | None = None
) -> dict[str, LoadedCapture]:
    """Find the captures among definitions, by the metadata of their raw assets.

    Args:
        instance: as in `open_resources`.

    Raises:
        ConfigurationError: a resource reads an environment variable that is not set.
    """
    captures = {}
    for spec in definitions.resolve_all_asset_specs():
        value = spec.metadata.get(CAPTURE_METADATA)
        if value is not None:
            captures[spec.key] = read_capture_settings(value)
    declared = definitions.resources or {}
    used: dict[str, Any] = {}
    for capture in captures.values():
        names = Names.of(capture)
        used |= {key: declared[key] for key in (names.postgres, names.lake, names.spark)}
    found = {}
    # One instance of Dagster for all resources: `process_config_and_initialize` creates an
    # instance for each resource, in 50 ms, and does not close the databases of the instance.
    with open_resources(used, instance) as resources:
        for raw, capture in captures.items():
            names = Names.of(capture)
            found[capture.name] = LoadedCapture(
                capture,
                raw,
                getattr(resources, names.postgres),
                getattr(resources, names.lake),
                getattr(resources, names.spark),
            )
    return found


def _explained(folder: Path, error: Exception) -> tuple[PgcdcError, bool]:
    """Return a sentence about an error of Dagster, and whether the error itself may be shown.

    Errors of pydantic quote values, and so do Dagster's excerpts of a file.
    """
    last: BaseException = error
    while last.__cause__ is not None:
        last = last.__cause__
        if isinstance(last, PgcdcError):
            return last, False
    text, may_be_shown = str(last), False
    first = (text.splitlines() or [""])[0]
    if isinstance(last, ValidationError):
        found = last.errors(include_input=False, include_url=False)[0]
        reason = f"`{'.'.join(map(str, found['loc']))}`: {found['msg']}"
    elif isinstance(last, ResolutionException):
        undefined = re.search(r"\^ ('\w+' is undefined)", text)
        reason = f"{first}: {undefined[1] if undefined else 'it cannot be resolved'}"
    else:
        reason, may_be_shown = f"{type(last).__name__}: {first}", True
    sentence = f"The components below {folder} cannot be loaded: {reason}"
    return ConfigurationError(reason=sentence), may_be_shown


def _reason(error: Exception | SystemExit) -> str:
    """Describe an error of a user's module: its class, its place, and the text if it is safe."""
    reason = type(error).__name__
    if isinstance(error, _SHOWN):
        reason += f": {first_line(error)}"
    *_, place = traceback.extract_tb(error.__traceback__)
    if not isinstance(error, SyntaxError):
        reason += f" ({place.filename}, line {place.lineno})"
    return f"{reason}. Correct the module; --debug shows the stack trace"


def _definitions_of(module: ModuleType) -> dg.Definitions:
    from dagster.components.definitions import LazyDefinitions

    found = [
        value
        for value in vars(module).values()
        if isinstance(value, dg.Definitions | LazyDefinitions)
    ]
    if len(found) != 1:
        raise ConfigurationError(
            reason=f"Module {module.__name__} has {len(found)} Dagster definitions; it must have "
            "one"
        )
    if isinstance(found[0], dg.Definitions):
        return found[0]
    loaded: dg.Definitions = found[0]()
    return loaded


def _module_of(folder: Path) -> ModuleType:
    """Create a package for a folder, because Dagster's component tree requires a package."""
    name = f"pgcdc_assets.defs_{zlib.crc32(str(folder).encode()):08x}"
    if name in sys.modules and list(sys.modules[name].__path__) == [str(folder)]:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = str(folder / "__init__.py")
    module.__path__ = [str(folder)]
    sys.modules[name] = module
    return module
