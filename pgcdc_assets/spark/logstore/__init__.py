"""A LogStore for S3 whose commits fail if the log entry exists, for any number of writers.

Delta's own LogStore for S3 assumes that one driver writes a table. `PutIfAbsentLogStore.java` is
the source of the jar, which `build` writes reproducibly: `python -m pgcdc_assets.spark.logstore`.
"""

from __future__ import annotations

import io
import subprocess
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

JAR = Path(__file__).with_name("pgcdc-logstore.jar")
CLASS = "pgcdc.logstore.PutIfAbsentLogStore"
SOURCE = Path(__file__).with_name("PutIfAbsentLogStore.java")

# The oldest Java of Spark 4.
_RELEASE = "17"
# The earliest time of a zip file: the jar's bytes depend on the classes only.
_TIME = (1980, 1, 1, 0, 0, 0)


def build(javac: str, class_path: Sequence[Path]) -> bytes:
    """Compile the source, and return the bytes of the jar.

    Args:
        javac: path of the compiler.
        class_path: the jars of delta-storage and of Hadoop's client.

    Raises:
        CalledProcessError: the source does not compile.
    """
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [
                javac,
                *("--release", _RELEASE, "-g:none", "-Xlint:all,-path,-classfile", "-proc:none"),
                *("-d", folder, "-cp", ":".join(map(str, class_path)), str(SOURCE)),
            ],
            check=True,
            capture_output=True,
        )
        jar = io.BytesIO()
        with zipfile.ZipFile(jar, "w", zipfile.ZIP_DEFLATED) as archive:
            manifest = zipfile.ZipInfo("META-INF/MANIFEST.MF", _TIME)
            archive.writestr(manifest, "Manifest-Version: 1.0\n\n")
            for file in sorted(Path(folder).rglob("*.class")):
                entry = zipfile.ZipInfo(file.relative_to(folder).as_posix(), _TIME)
                entry.compress_type = zipfile.ZIP_STORED
                archive.writestr(entry, file.read_bytes())
        return jar.getvalue()
