"""Downloads of single jars from Maven Central.

Apache Ivy, which PySpark contains for the download of Delta's jars, downloads and verifies a jar.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path


def download_jar(group: str, artifact: str, version: str, folder: Path) -> Path:
    """Download a jar without its dependencies into an empty folder; return the jar's path.

    Raises:
        LookupError: PySpark is not installed.
        OSError: the download failed.
    """
    pyspark = importlib.util.find_spec("pyspark")
    if pyspark is None or pyspark.origin is None:
        raise LookupError("PySpark is not installed")
    (ivy,) = (Path(pyspark.origin).parent / "jars").glob("ivy-*.jar")
    home = os.environ.get("JAVA_HOME")
    # Use a separate cache, because Spark's cache has no lock.
    arguments = ("-warn", "-cache", str(folder / "cache"), "-types", "jar", "-notransitive")
    done = subprocess.run(
        [
            f"{home}/bin/java" if home else "java",
            *("-cp", str(ivy), "org.apache.ivy.Main", *arguments),
            *("-dependency", group, artifact, version, "-retrieve", f"{folder}/[artifact].[ext]"),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    jars = list(folder.glob("*.jar"))
    if done.returncode or len(jars) != 1:
        name = f"{group}:{artifact}:{version}"
        raise OSError(f"{name} was not downloaded: {done.stdout[-1000:]}")
    return jars[0]
