"""Comparisons in a process whose Spark has ended."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.spark

_SCRIPT = """
from pgcdc_assets.errors import TransientError
from pgcdc_assets.spark.session import spark_session
from pgcdc_assets.verify.reading_errors import comparison_session

spark = spark_session("pgcdc test")
with comparison_session(spark) as session:
    assert session.sql("select 1").collect()[0][0] == 1
spark.sparkContext._gateway.proc.kill()
spark.sparkContext._gateway.proc.wait()
try:
    with comparison_session(spark):
        raise AssertionError("Spark has ended")
except TransientError as error:
    print(error)
"""


@pytest.mark.sampled
def test_the_end_of_spark_is_a_transient_error() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("No table was compared: Spark has ended (")
