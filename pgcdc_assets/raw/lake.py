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

ENVIRONMENT_VARIABLE = "PGCDC_LAKE"

# delta-rs converts a local path to a URL: it decodes percent escapes, and rejects the other
# characters.
_UNUSABLE = re.compile(r"%[0-9A-Fa-f]{2}|[\[\]|^\\]")


@dataclass(frozen=True)
class Lake:
    """The root of all tables.

    Attributes:
        uri: a local path (`~` and `file://` are allowed) or an object-store URI (`s3://`, `gs://`,
            `abfss://`).
        storage_options: options of delta-rs (credentials, endpoint, region).

    Raises:
        ConfigurationError: the path is empty, or contains characters that delta-rs rejects.
    """

    uri: str
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        uri = self.uri.removeprefix("file://") if self.uri.startswith("file:///") else self.uri
        if not uri.strip():
            raise ConfigurationError(
                reason=f"The lake has no path. Set {ENVIRONMENT_VARIABLE} to a folder or an "
                "object-store URI."
            )
        if "://" not in uri:
            uri = str(Path(uri).expanduser().absolute())
            odd = _UNUSABLE.search(uri)
            if odd is not None:
                raise ConfigurationError(
                    reason=f"The lake {uri} has {odd[0]} in its path, which delta-rs cannot "
                    "handle. Choose a folder without these characters."
                )
        object.__setattr__(self, "uri", uri.rstrip("/") or "/")

    @classmethod
    def from_environment(cls, default: str | Path) -> Lake:
        """Return the lake of PGCDC_LAKE, or the default if PGCDC_LAKE is unset or empty."""
        return cls(os.environ.get(ENVIRONMENT_VARIABLE, "").strip() or str(default))

    @property
    def is_local(self) -> bool:
        """Whether the lake is a local folder."""
        return "://" not in self.uri

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
