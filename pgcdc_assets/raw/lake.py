"""The location of all tables: a local folder or an object store, given by a path or URI.

This module builds the paths of all tables. A local lake is an absolute path, so Spark, delta-rs and
Dagster runs with another working directory use the same folder.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.settings.storage import (
    Storage,
    check_delta_options,
    check_lake_form,
    is_s3,
    local_folder,
    without_file_scheme,
)

ENVIRONMENT_VARIABLE = "PGCDC_LAKE"

# delta-rs converts a local path to a URL: it decodes percent escapes, and rejects the other
# characters.
_UNUSABLE = re.compile(r"%[0-9A-Fa-f]{2}|[\[\]|^\\]")


@dataclass(frozen=True)
class Lake:
    """The root of all tables.

    Attributes:
        uri: a local path (`~` and `file:///` are allowed) or an object-store URI (`s3://`, `gs://`,
            `abfss://`).
        storage_options: further options of delta-rs. For an S3 store, these are other options
            than the settings of `storage`.
        storage: the settings of an S3 store.

    Raises:
        ConfigurationError: the path is empty, or contains characters that delta-rs rejects, or
            begins with the home folder of an unknown user; or a URI has no bucket, or has no `//`
            after its scheme; or an option of an S3 store is a setting of `storage`.
    """

    uri: str
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    storage: Storage = field(default_factory=Storage)

    def __post_init__(self) -> None:
        check_lake_form(self.uri, "The lake")
        check_delta_options(self.uri, self.storage_options)
        uri = without_file_scheme(self.uri)
        if not uri.strip():
            raise ConfigurationError(
                reason=f"The lake has no path. Set {ENVIRONMENT_VARIABLE} to a folder or an "
                "object-store URI."
            )
        if "://" not in uri:
            path = local_folder(uri, "The lake")
            # Hadoop removes `..` and the name before it, also if that is a link to another folder.
            uri = os.path.realpath(path) if ".." in path.parts else str(path)
            odd = _UNUSABLE.search(uri)
            if odd is not None:
                raise ConfigurationError(
                    reason=f"The lake {uri} has {odd[0]} in its path, which delta-rs cannot "
                    "handle. Choose a folder without these characters."
                )
        object.__setattr__(self, "uri", uri.rstrip("/") or "/")

    @classmethod
    def from_environment(cls, default: str | Path) -> Lake:
        """Return the lake of PGCDC_LAKE, or the default if PGCDC_LAKE is unset or empty.

        Raises:
            ConfigurationError: PGCDC_LAKE is not the address of a lake.
        """
        given = os.environ.get(ENVIRONMENT_VARIABLE, "").strip()
        check_lake_form(given, ENVIRONMENT_VARIABLE)
        return cls(given or str(default))

    @property
    def is_local(self) -> bool:
        """Whether the lake is a local folder."""
        return "://" not in self.uri

    @property
    def is_s3(self) -> bool:
        """Whether the lake is in an S3 store."""
        return is_s3(self.uri)

    @property
    def delta_options(self) -> dict[str, str] | None:
        """The options of delta-rs; None without options.

        Raises:
            ConfigurationError: the environment variable of a credential is not set.
        """
        own = self.storage.delta_options() if self.is_s3 else {}
        return {**own, **self.storage_options} or None

    @property
    def ignores_case(self) -> bool:
        """Whether the lake's file system takes `A` and `a` for one folder, as on macOS and Windows.

        The lake's folder, or the nearest parent that exists and has a letter in its name, decides.
        Object stores distinguish case.
        """
        folder = Path(self.uri)
        for each in (folder, *folder.parents) if self.is_local else ():
            other = each.with_name(each.name.swapcase()) if each.name else each
            if other != each and each.exists():
                return other.exists() and other.samefile(each)
        return False

    def find_case_twin(self, path: str) -> str | None:
        """Return the existing folder whose path differs from `path` in case only, or None."""
        folder = Path(self.uri)
        if not self.ignores_case or not Path(path).is_relative_to(folder):
            return None
        for part in Path(path).relative_to(folder).parts:
            names = os.listdir(folder) if folder.is_dir() else []
            if part not in names:
                twins = [name for name in names if name.casefold() == part.casefold()]
                return str(folder / twins[0]) if twins else None
            folder /= part
        return None

    def check_folder(self, table: str, path: str) -> None:
        """Check that the folder of a table does not belong to a table of another case.

        Args:
            table: the table's name in sentences.
            path: the table's address.

        Raises:
            ConfigurationError: the file system ignores case, and the folder exists in another case.
        """
        twin = self.find_case_twin(path)
        if twin is not None:
            raise ConfigurationError(
                reason=f"Table {table} cannot be written: the lake's file system ignores case, and "
                f"folder {twin} belongs to a table or schema whose name differs in case only. "
                "Leave one of the two out of the settings, or move the lake to a file system that "
                "distinguishes case."
            )

    def path(self, *parts: str) -> str:
        """Return the path or URI of `parts` below the root."""
        return "/".join([self.uri.rstrip("/"), *parts])

    def check_writable(self) -> None:
        """Create the root of a local lake, and write a test file.

        The check skips object stores: the first write of a table reports a missing permission.

        Raises:
            ConfigurationError: the folder cannot be created or written.
        """
        if not self.is_local:
            return
        root = Path(self.uri)
        probe = root / f".pgcdc-{uuid.uuid4().hex}"
        try:
            root.mkdir(parents=True, exist_ok=True)
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigurationError(
                reason=f"The lake {self.uri} cannot be written ({error.strerror}). Make it "
                f"writable for this user, or set {ENVIRONMENT_VARIABLE} to another place."
            ) from error
