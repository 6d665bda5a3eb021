"""Archive of the classes that Spark loads, for the JVMs of a test run: `make test`.

About thirty JVMs of a test run load the same classes from the same jars. A JVM that maps an archive
of loaded classes (class data sharing, AppCDS) needs three seconds less of processor time for the
start of its session, and nine seconds less for its first twenty merges.

The archive belongs to one Java and to the jars of one PySpark. A JVM without the archive, or with
another class path, loads the classes from the jars. The archive affects only the time of a test.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pgcdc_assets.local import locked

FOLDER = Path(__file__).resolve().parents[2] / ".pgcdc" / "java-classes"
_SECONDS_TO_WRITE = 120.0
_SILENT = "-Xlog:cds*=off"


def archive_options() -> str:
    """Return the options of a JVM that maps the archive; no options without an archive."""
    archive = archive_path()
    # A JVM with other jars would print a message about the archive. Options are split at spaces.
    is_usable = archive.exists() and not re.search(r"\s", str(archive))
    return f"-XX:SharedArchiveFile={archive} {_SILENT}" if is_usable else ""


def archive_path() -> Path:
    """Return the path of the archive for this Java and these jars."""
    package = importlib.util.find_spec("pyspark")
    if package is None or package.origin is None:
        raise LookupError("PySpark is not installed")
    home = os.environ.get("JAVA_HOME")
    java = f"{home}/bin/java" if home else shutil.which("java") or ""
    known = [os.path.realpath(java), str(os.stat(java).st_mtime_ns)] if java else []
    for jar in sorted((Path(package.origin).parent / "jars").glob("*.jar")):
        known.append(f"{jar} {jar.stat().st_size} {jar.stat().st_mtime_ns}")
    return FOLDER / f"{hashlib.sha256(os.fsencode(chr(10).join(known))).hexdigest()[:16]}.jsa"


def write_archive() -> Path:
    """Write the archive if it does not exist; return its path.

    Raises:
        OSError: the JVM wrote no archive. The message ends with the output of the JVM.
    """
    archive = archive_path()
    with locked(FOLDER / ".lock"):
        if archive.exists():
            return archive
        for other in FOLDER.glob("*.jsa"):
            other.unlink()
        with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
            draft = Path(scratch) / "classes.jsa"
            done = subprocess.run(
                [sys.executable, "-m", __spec__.name, str(draft)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            if done.returncode or not draft.exists():
                raise OSError(f"The classes of Java were not archived: {done.stdout[-1000:]}")
            draft.rename(archive)
    return archive


def _load_classes(draft: Path) -> None:
    """Merge a table in a JVM, which writes the archive at its end."""
    from pgcdc_assets.merge import MergeReport, merge_tables
    from pgcdc_assets.raw.lake import Lake
    from pgcdc_assets.raw.zone import RawZone
    from pgcdc_assets.settings import CdcTable
    from pgcdc_assets.spark.session import spark_session
    from pgcdc_assets_tests.support.merge.history import (
        Landing,
        column,
        delete,
        insert,
        relation,
        update,
    )
    from pgcdc_assets_tests.support.spark import CONF, JAVA_OPTIONS

    os.environ.pop("JDK_JAVA_OPTIONS", None)
    options = f"{JAVA_OPTIONS} -XX:ArchiveClassesAtExit={draft} {_SILENT}"
    conf = {
        **CONF,
        "spark.driver.extraJavaOptions": options,
        "spark.sql.warehouse.dir": f"{draft.parent}/warehouse",
    }
    spark = spark_session("classes", conf=conf)
    gateway: Any = spark.sparkContext._gateway
    landing = Landing(
        RawZone(Lake(f"{draft.parent}/lake"), "test"), [relation(column("id"), column("v", "text"))]
    )
    landing.begin([("1", "a"), ("2", "b")])
    target = CdcTable("shop", "items", scd=(1, 2))
    landing.land([insert("3", "c"), update("1", "z"), delete("2", None)])
    for report in merge_tables(spark, landing.zone, [target], landing.windows[-1]):
        assert isinstance(report, MergeReport), report.error
    spark.stop()
    gateway.shutdown()
    # The JVM ends at the end of its standard input.
    gateway.proc.stdin.close()
    gateway.proc.wait(_SECONDS_TO_WRITE)


def main(arguments: list[str]) -> int:
    """Write the archive; with a path, load the classes and write them to the path."""
    if arguments:
        _load_classes(Path(arguments[0]))
        return 0
    try:
        write_archive()
    except (LookupError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
