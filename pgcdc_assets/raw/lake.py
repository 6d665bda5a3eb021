"""Where the tables live: a local folder or an object store, named by one path or URI.

Nothing below this module joins paths or asks whether the lake is local. A local lake is always an
absolute path, so that Spark, delta-rs and a Dagster run started elsewhere mean the same folder.
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

# delta-rs makes a URL of a local path: it decodes percent signs, and fails at the others.
_UNUSABLE = re.compile(r"%[0-9A-Fa-f]{2}|[\[\]|^\\]")


@dataclass(frozen=True)
class Lake:
    """The root of all tables.

    Attributes:
        uri: a local path (`~` and `file://` are understood) or an object-store URI (`s3://`,
            `gs://`, `abfss://`).
        storage_options: passed to delta-rs as they are (credentials, endpoint, region).
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
                    reason=f"The lake {uri} has {odd[0]} in its path, which delta-rs takes for "
                    "something else. Choose a folder without it."
                )
        object.__setattr__(self, "uri", uri.rstrip("/") or "/")

    @classmethod
    def from_environment(cls, default: str | Path) -> Lake:
        """Take the lake from PGCDC_LAKE, else the default."""
        return cls(os.environ.get(ENVIRONMENT_VARIABLE, "").strip() or str(default))

    @property
    def is_local(self) -> bool:
        """Say whether the tables are files of this machine."""
        return "://" not in self.uri

    def path(self, *parts: str) -> str:
        """Join the parts below the root; every table's address is made here."""
        return "/".join([self.uri.rstrip("/"), *parts])

    def check_writable(self) -> None:
        """Create the root of a local lake where it is missing, and try to write a file in it.

        Object stores are not tried: the first table written tells.

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
