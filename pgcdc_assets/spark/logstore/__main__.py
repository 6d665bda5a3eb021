"""Write the jar of the LogStore: `python -m pgcdc_assets.spark.logstore`."""

from __future__ import annotations

import shutil
import sys

from pgcdc_assets.spark.jars import find_jars
from pgcdc_assets.spark.logstore import JAR, build

if __name__ == "__main__":
    javac = shutil.which("javac")
    if javac is None:
        sys.exit("javac is missing: apt-get install openjdk-17-jdk-headless")
    JAR.write_bytes(build(javac, find_jars("delta-storage", "hadoop-client-api")))
