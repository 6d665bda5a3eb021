"""The setting `catalog`: where the SCD tables have names."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pgcdc_assets.errors import ConfigurationError

# The catalogs in which SCD tables are registered (`catalog.type`). SESSION: whatever catalog the
# Spark session has. HIVE: the session's own catalog, which must be a Hive metastore. UNITY: a
# catalog that the session's settings declare under a name of its own.
SESSION, HIVE, UNITY = "session", "hive", "unity"
CATALOG_TYPES = (SESSION, HIVE, UNITY)
SESSION_CATALOG = "spark_catalog"
_CATALOG_NAME = re.compile(r"[a-z][a-z0-9_]{0,127}")


@dataclass(frozen=True)
class CatalogPolicy:
    """The catalog of Spark in which the SCD tables are registered, so that queries find them.

    Attributes:
        schema: the schema of the entries, created if it does not exist.
        type: `session`, `hive` or `unity`.
        name: the catalog's name in Spark; `spark_catalog` is the session's own.
    """

    schema: str
    type: str = SESSION
    name: str = SESSION_CATALOG

    @property
    def is_hive(self) -> bool:
        """Whether the session's own catalog must be a Hive metastore."""
        return self.type == HIVE

    def __post_init__(self) -> None:
        if self.type not in CATALOG_TYPES:
            raise ConfigurationError(
                reason=f"catalog.type is {self.type!r}, but must be {SESSION} (the catalog of the "
                f"Spark session), {HIVE} (a Hive metastore) or {UNITY} (Unity Catalog)"
            )
        for setting in ("schema", "name"):
            value = getattr(self, setting)
            if not isinstance(value, str) or not _CATALOG_NAME.fullmatch(value):
                raise ConfigurationError(
                    reason=f"catalog.{setting} is {value!r}: use lower-case letters, digits and "
                    "underscores, and begin with a letter, because a Hive metastore ignores case"
                )
        if self.type == HIVE and self.name != SESSION_CATALOG:
            raise ConfigurationError(
                reason=f"catalog.name is {self.name!r}, but a Hive metastore is the catalog "
                f"{SESSION_CATALOG} of the session: leave the name out"
            )
        if self.type == UNITY and self.name == SESSION_CATALOG:
            raise ConfigurationError(
                reason="catalog.name is missing: with type unity, give the catalog's name in Spark"
            )
