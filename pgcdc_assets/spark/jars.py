"""The jars of `spark.jars.packages`: one resolution at a time, and none for known jars.

Spark resolves packages with Ivy, whose cache has no lock. With an empty cache, processes that start
at the same time (steps of a run, workers of a test run) overwrite each other's files and fail.

A resolution takes seconds even with a filled cache. After a start, the paths of the resolved jars
are therefore written to a file. A later session with the same packages on this machine gets the
jars on its class path, without a resolution. The jars are then loaded by the JVM's own class
loader, so an archive of classes can contain their classes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pgcdc_assets.local import drafted, locked
from pgcdc_assets.spark import logstore
from pgcdc_assets.spark.object_store import S3_EXCLUDES

PACKAGES = "spark.jars.packages"
CLASS_PATH = "spark.driver.extraClassPath"
MASTER = "spark.master"
JARS, EXCLUDES = "spark.jars", "spark.jars.excludes"
# With another value of these settings, the user determines which jars are loaded, or from where.
_OWN_VALUES: Mapping[str, str] = {
    JARS: str(logstore.JAR),
    EXCLUDES: S3_EXCLUDES,
    "spark.jars.repositories": "",
    "spark.jars.ivySettings": "",
}
# Libraries with the same classes as a library of Spark that has another name.
_PROVIDED_BY = {"commons-logging": "jcl-over-slf4j"}
_VERSION = re.compile(r"-\d[\w.\-]*\.jar$")


@contextmanager
def looking_up_alone() -> Iterator[None]:
    """Wait for this user's lock, and hold the lock for the block.

    Continue without a lock if the lock file cannot be created, such as in a read-only home folder.
    """
    with ExitStack() as held:
        with suppress(OSError, RuntimeError):
            held.enter_context(locked(cache_folder() / "spark-jars.lock"))
        yield


def cache_folder() -> Path:
    """Return this user's folder for files that any project of the machine can use."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "pgcdc"


def spark_jars() -> list[Path]:
    """Return the jars inside the PySpark package, in order of their names; none without PySpark."""
    package = importlib.util.find_spec("pyspark")
    if package is None or package.origin is None:
        return []
    return sorted((Path(package.origin).parent / "jars").glob("*.jar"))


def find_jars(*artifacts: str) -> list[Path]:
    """Return the jars of artifacts among Spark's own and the known jars.

    Raises:
        LookupError: an artifact has no jar.
    """
    known = [Path(path) for jars in _read().values() for path in jars]
    found = []
    for artifact in artifacts:
        jars = [
            jar
            for jar in (*spark_jars(), *known)
            if artifact in (_VERSION.sub("", jar.name), _artifact(jar)) and jar.exists()
        ]
        if not jars:
            raise LookupError(f"{artifact} has no jar: start an embedded Spark session once")
        found.append(jars[0])
    return found


def with_known_jars(conf: Mapping[str, str]) -> dict[str, str]:
    """Return settings with the known jars of the packages on the driver's class path.

    The settings are returned unchanged if the jars are not known, if one of them is missing, or if
    executors need the jars too (a master that is not local).
    """
    packages = conf.get(PACKAGES, "")
    if not packages or not is_one_machine(conf.get(MASTER, "")) or _is_of_user(conf):
        return dict(conf)
    jars = _read().get(_key(packages))
    if not jars or not all(_is_there(path, size) for path, size in jars.items()):
        return dict(conf)
    class_path = [*jars, *filter(None, [conf.get(CLASS_PATH)])]
    resolved = {name: "" for name in (PACKAGES, EXCLUDES, JARS) if name in conf}
    return {**conf, **resolved, CLASS_PATH: os.pathsep.join(class_path)}


def is_one_machine(master: str) -> bool:
    """Return whether the driver of a master does the work itself."""
    return master == "local" or master.startswith("local[")


def remember_jars(conf: Mapping[str, str], resolved: str) -> None:
    """Write the paths of resolved jars for later sessions. A file error has no effect.

    Args:
        conf: the settings of the session.
        resolved: the session's setting `spark.jars` after its start: URIs, separated by commas.
    """
    packages = conf.get(PACKAGES, "")
    if not packages or not resolved or _is_of_user(conf):
        return
    with suppress(OSError, RuntimeError, ValueError):
        jars = {str(path): path.stat().st_size for path in _lacking(resolved.split(","))}
        known = _read()
        if known.get(_key(packages)) == jars:
            return
        file = _file()
        file.parent.mkdir(parents=True, exist_ok=True)
        with drafted(file) as draft:
            draft.write_text(json.dumps({**known, _key(packages): jars}, indent=1))


def _is_of_user(conf: Mapping[str, str]) -> bool:
    return any(conf.get(name) not in (None, "", own) for name, own in _OWN_VALUES.items())


def _lacking(uris: Sequence[str]) -> list[Path]:
    """Return the jars that Spark's own jars do not include, in order.

    The driver's class path precedes Spark's jars. Another version of a library there would replace
    Spark's own.

    Raises:
        ValueError: a URI is not a local file.
    """
    present = {_VERSION.sub("", path.name) for path in spark_jars()}
    lacking = []
    for uri in uris:
        parts = urlsplit(uri)
        if parts.scheme not in ("", "file"):
            raise ValueError(f"{parts.scheme} is not a local file")
        path = Path(unquote(parts.path))
        artifact = _artifact(path)
        if not present & {artifact, _PROVIDED_BY.get(artifact)}:
            lacking.append(path)
    return lacking


def _artifact(jar: Path) -> str:
    # Ivy names a file group_artifact-version.jar; a group has no underscore.
    return _VERSION.sub("", jar.name.partition("_")[2])


def _is_there(path: str, size: int) -> bool:
    with suppress(OSError):
        return os.stat(path).st_size == size and os.pathsep not in path
    return False


def _key(packages: str) -> str:
    """Return the key of the packages for this installation of PySpark."""
    jars = spark_jars()
    return f"{packages} {jars[0].parent if jars else ''} {len(jars)}"


def _read() -> dict[str, dict[str, int]]:
    """Return the known jars with their sizes in bytes, by key."""
    with suppress(OSError, RuntimeError, ValueError, AttributeError, TypeError):
        known = json.loads(_file().read_text())
        return {
            key: {path: int(size) for path, size in jars.items()} for key, jars in known.items()
        }
    return {}


def _file() -> Path:
    return cache_folder() / "spark-jars.json"
