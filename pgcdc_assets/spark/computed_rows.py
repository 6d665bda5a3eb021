"""Rows that several queries read, computed once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from pyspark import StorageLevel

from pgcdc_assets.spark.jars import MASTER, is_one_machine

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_on_one_machine: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def compute_rows(rows: DataFrame) -> DataFrame:
    """Compute rows now, and return the stored rows.

    On a cluster, two executors store each part: Spark cannot compute the parts of a lost executor
    again, because the rows no longer have a plan.
    """
    session = rows.sparkSession
    if session not in _on_one_machine:
        _on_one_machine[session] = is_one_machine(session.conf.get(MASTER, None) or "")
    if _on_one_machine[session]:
        return rows.localCheckpoint()
    return rows.localCheckpoint(storageLevel=StorageLevel.MEMORY_AND_DISK_2)
