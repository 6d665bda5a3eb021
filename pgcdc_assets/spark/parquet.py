"""A read of Parquet files by their addresses, without Delta."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

# The characters of Hadoop's glob patterns.
_GLOB = re.compile(r"[\\{}\[\]*?]")


def read_parquet(
    session: SparkSession,
    files: Iterable[str],
    schema: StructType | str,
    *,
    base_path: str | None = None,
) -> DataFrame:
    r"""Read Parquet files. The addresses may contain any character.

    Spark takes an address for a glob pattern: the folder `lake*` would also be the folder
    `lake_backup`, and the folder `{a}` would not be found. So the characters of a pattern get a
    backslash: `lake\*`. The option `__globPaths__` would be simpler, but a Connect server ignores
    it: the server writes the names of options in lower case.

    Args:
        files: paths or URIs of files.
        schema: the columns; otherwise Spark would open a file to find them.
        base_path: the folder whose subfolders are partitions; None: the files have all columns.
    """
    reader = session.read.schema(schema)
    if base_path is not None:
        # Spark does not take the base path for a pattern.
        reader = reader.option("basePath", base_path)
    return reader.parquet(*(_GLOB.sub(r"\\\g<0>", file) for file in files))
