"""Archive of the classes that Spark loads at the start of a JVM and in its first merges.

A JVM that maps an archive of loaded classes (class data sharing, AppCDS) starts a session in half
of the time, and makes its first merges sooner. An archive belongs to one Java, to the jars of one
PySpark and to one class path. A JVM without the archive, or with an archive that does not fit,
loads the classes from the jars: the archive affects only the time.

`pgcdc spark prepare` writes the archive. Source: java(1), "Application Class Data Sharing".
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from pgcdc_assets.spark.jars import CLASS_PATH, cache_folder, spark_jars
from pgcdc_assets.spark.java import find_java

JAVA_OPTIONS = "spark.driver.extraJavaOptions"
# A JVM with an archive that does not fit would print warnings to its standard output.
SILENT = "-Xlog:cds*=off"
_ARCHIVE_OPTION = "-XX:SharedArchiveFile="
# Of 200 MB. Each installation of PySpark has an archive of its own.
_ARCHIVES_KEPT = 3


def archive_folder() -> Path:
    """Return the folder of this user's archives."""
    return cache_folder() / "java-classes"


def archive_path(conf: Mapping[str, str]) -> Path:
    """Return the archive's path for settings of a session: for this Java and these jars.

    Raises:
        LookupError: Java is not installed.
    """
    java = find_java()
    if java is None:
        raise LookupError("Java is not installed")
    known = [os.path.realpath(java), str(os.stat(java).st_mtime_ns), conf.get(CLASS_PATH, "")]
    known += [f"{jar} {jar.stat().st_size} {jar.stat().st_mtime_ns}" for jar in spark_jars()]
    digest = hashlib.sha256(os.fsencode("\n".join(known))).hexdigest()
    return archive_folder() / f"{digest[:16]}.jsa"


def with_archive(conf: Mapping[str, str]) -> dict[str, str]:
    """Return settings in which the driver's JVM maps the archive, if the archive exists.

    The archive's time of modification becomes the time of this call, see `delete_unused_archives`.
    """
    options = conf.get(JAVA_OPTIONS, "")
    try:
        archive = archive_path(conf)
        # Options are split at spaces.
        is_usable = archive.exists() and not re.search(r"\s", str(archive))
    except (LookupError, OSError, RuntimeError):
        return dict(conf)
    if not is_usable or _ARCHIVE_OPTION in options:
        return dict(conf)
    with suppress(OSError):
        os.utime(archive)
    return {**conf, JAVA_OPTIONS: f"{options} {_ARCHIVE_OPTION}{archive} {SILENT}".strip()}


def delete_unused_archives() -> None:
    """Delete all but the three archives that a session has used last."""
    found = sorted(archive_folder().glob("*.jsa"), key=lambda path: path.stat().st_mtime)
    for old in found[:-_ARCHIVES_KEPT]:
        with suppress(OSError):
            old.unlink()
