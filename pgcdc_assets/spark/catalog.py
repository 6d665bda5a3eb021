"""The entries of SCD tables in a catalog of Spark, so that queries find the tables by name.

An entry is the location of a Delta table. Spark reads columns and rows from the table's log, so an
entry stays correct while the table changes. Entries are created if they are missing. They are never
replaced and never dropped: an entry of the same name for another table is an error.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.settings.catalog import CatalogPolicy
from pgcdc_assets.spark.settings import CATALOG, HIVE, IN_MEMORY
from pgcdc_assets.spark.sql import delta_table, identifier, string
from pgcdc_assets.table_name import TableName

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Hive metastores know letters, digits and underscores, and ignore case.
_PLAIN = re.compile(r"[a-z0-9]+(_[a-z0-9]+)*")
_OTHER = re.compile(r"[^a-z0-9]+")
# With two parts, separators and kind, a name has 120 characters at most; Hive allows 128.
_LONGEST_PART, _DIGEST = 56, 8

_DESCRIBED = re.compile(r"^(Location|Provider):\s*(.*?)\s*$", re.MULTILINE)
_MISSING_SCHEMA = ("SCHEMA_NOT_FOUND", "NO_SUCH_DATABASE", "NoSuchDatabaseException")
# The first one: nested schemas are not supported.
_MISSING_CATALOG = (
    "_LEGACY_ERROR_TEMP_1126",
    "CATALOG_NOT_FOUND",
    "REQUIRES_SINGLE_PART_NAMESPACE",
)


_WHERE = (
    "where the session starts (spark_config, `pgcdc spark start --conf`, or the configuration of "
    "the Spark server)"
)


class CatalogTable(NamedTuple):
    """An SCD table to register.

    Attributes:
        path: the address of the Delta table.
    """

    table: TableName
    scd: int
    path: str


def entry_name(table: TableName, scd: int) -> str:
    """Return the name of a table in a catalog: `shop__order_items__scd1`.

    A part with other characters than lower-case letters, digits and single underscores, and a long
    part, gets a digest. So names that differ in case or punctuation only have different entries.
    """
    return f"{_entry_part(table.schema)}__{_entry_part(table.table)}__scd{scd}"


def qualified_entry_name(policy: CatalogPolicy, table: TableName, scd: int) -> str:
    """Return the name that queries use, with catalog and schema."""
    return f"{policy.name}.{policy.schema}.{entry_name(table, scd)}"


def check_catalog(spark: SparkSession, policy: CatalogPolicy) -> None:
    """Check that a session has the catalog of the settings.

    Raises:
        ConfigurationError: the catalog is not there, or does not answer; the error has the remedy.
    """
    _check_kind(spark, policy)
    try:
        spark.sql(f"SHOW SCHEMAS IN {identifier(policy.name)}").collect()
    except Exception as error:
        if _condition_of(error).startswith(_MISSING_SCHEMA):
            # Spark takes the name of an unknown catalog for a schema.
            raise _missing(policy) from error
        raise _unavailable(policy, error) from error


def register_tables(
    spark: SparkSession,
    policy: CatalogPolicy,
    tables: Iterable[CatalogTable],
    known: Collection[CatalogTable] = (),
) -> Iterator[tuple[CatalogTable, ConfigurationError | None]]:
    """Create the missing entries of tables; yield each table, with an error for a wrong entry.

    One query lists the names in the schema.

    Args:
        tables: Delta tables that exist.
        known: tables whose entries, if there are entries, need not be compared again.

    Raises:
        ConfigurationError: the catalog is not there, or does not answer.
    """
    wanted = [(entry_name(each.table, each.scd), each) for each in tables]
    if not wanted:
        return
    _check_kind(spark, policy)
    names = _list_names(spark, policy)
    for name, each in wanted:
        error: ConfigurationError | None = None
        try:
            if name not in names:
                _create_entry(spark, policy, name, each.path)
            if name not in names or each not in known:
                _check_entry(spark, policy, name, each)
        except ConfigurationError as wrong:
            error = wrong
        except Exception as failure:
            error = _failed(policy, name, each, failure)
        yield each, error


def _check_kind(spark: SparkSession, policy: CatalogPolicy) -> None:
    kind = spark.conf.get(CATALOG, IN_MEMORY)
    if policy.is_hive and kind != HIVE:
        raise ConfigurationError(
            reason=f"catalog.type is {policy.type}, but the Spark session has a catalog in memory: "
            f"set {CATALOG}={HIVE} and the address of the metastore {_WHERE}"
        )


def _entry_part(name: str) -> str:
    if _PLAIN.fullmatch(name) and len(name) <= _LONGEST_PART:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:_DIGEST]
    readable = _OTHER.sub("_", name.lower())[: _LONGEST_PART - _DIGEST - 1].strip("_")
    return f"{readable}_{digest}" if readable else digest


def _condition_of(error: Exception) -> str:
    # Import here: definitions load without Spark.
    from pgcdc_assets.spark.errors import condition_of

    return condition_of(error)


def _schema(policy: CatalogPolicy) -> str:
    return f"{identifier(policy.name)}.{identifier(policy.schema)}"


def _list_names(spark: SparkSession, policy: CatalogPolicy) -> set[str]:
    """List the names of the entries; create the schema if it does not exist."""
    schema = _schema(policy)

    def listed() -> set[str]:
        rows = spark.sql(f"SHOW TABLES IN {schema}").collect()
        return {row["tableName"].lower() for row in rows if not row["isTemporary"]}

    try:
        return listed()
    except Exception as error:
        if not _condition_of(error).startswith(_MISSING_SCHEMA):
            raise _unavailable(policy, error) from error
    try:
        spark.sql(f"CREATE SCHEMA IF NOT EXISTS {schema}").collect()
        return listed()
    except Exception as error:
        raise _unavailable(policy, error) from error


def _create_entry(spark: SparkSession, policy: CatalogPolicy, name: str, path: str) -> None:
    """Create an entry.

    Without a Delta table at the path, the statement would make an empty one. Reading the schema
    first is an error then, and costs nothing otherwise: Delta keeps the snapshot in memory.

    CREATE TABLE IF NOT EXISTS `spark_catalog`.`cdc`.`shop__orders__scd1`
    USING delta LOCATION '/lake/shop/scd1/shop/orders'
    """
    _ = spark.sql(f"SELECT * FROM {delta_table(path)}").schema
    spark.sql(
        f"CREATE TABLE IF NOT EXISTS {_schema(policy)}.{identifier(name)} USING delta "
        f"LOCATION {string(path)}"
    ).collect()


def _check_entry(
    spark: SparkSession, policy: CatalogPolicy, name: str, wanted: CatalogTable
) -> None:
    """Check that an entry is the table's.

    Raises:
        ConfigurationError: the entry is another table's.
    """
    rows = spark.sql(f"SHOW TABLE EXTENDED IN {_schema(policy)} LIKE {string(name)}").collect()
    described = {
        key: value for row in rows for key, value in _DESCRIBED.findall(row["information"])
    }
    provider, location = described.get("Provider", "").lower(), described.get("Location", "")
    if provider == "delta" and _is_same_place(location, wanted.path):
        return
    what = f"a table at {location}" if location else "something without a location"
    if location and provider != "delta":
        what = f"a table of {provider or 'an unknown format'} at {location}"
    raise ConfigurationError(
        reason=f"Table {wanted.table} (scd{wanted.scd}) at {wanted.path} is not registered: the "
        f"name {policy.name}.{policy.schema}.{name} is {what}. Drop or rename that entry if it is "
        "obsolete (DROP TABLE keeps the files of an external table), or set another catalog.schema"
    )


def _is_same_place(location: str, path: str) -> bool:
    return _plain_path(path) in (_plain_path(location), _plain_path(unquote(location)))


def _plain_path(path: str) -> str:
    """Return an address in the form in which addresses of one place are equal."""
    path = re.sub(r"^file:/+", "/", path)
    return re.sub(r"^s3[an]?://", "s3://", path).rstrip("/")


def _unavailable(policy: CatalogPolicy, error: Exception) -> ConfigurationError:
    condition = _condition_of(error)
    if condition.startswith(_MISSING_CATALOG):
        return _missing(policy)
    return ConfigurationError(
        reason=f"Catalog {policy.name} cannot be used: Spark reported {condition} for schema "
        f"{policy.schema}. Check the catalog's service, its settings and the privileges"
    )


def _missing(policy: CatalogPolicy) -> ConfigurationError:
    return ConfigurationError(
        reason=f"The Spark session has no catalog {policy.name}: set "
        f"spark.sql.catalog.{policy.name} and the catalog's other settings {_WHERE}"
    )


def _failed(
    policy: CatalogPolicy, name: str, wanted: CatalogTable, error: Exception
) -> ConfigurationError:
    return ConfigurationError(
        reason=f"Table {wanted.table} (scd{wanted.scd}) at {wanted.path} is not registered as "
        f"{policy.name}.{policy.schema}.{name}: Spark reported {_condition_of(error)}. Check the "
        "catalog's service and the privileges; the next merge tries again"
    )
