"""`pgcdc spark prepare`: jars and classes, with which Spark starts faster on this machine."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.local import locked
from pgcdc_assets.spark.class_archive import archive_folder, archive_path, delete_unused_archives
from pgcdc_assets.spark.jars import CLASS_PATH, with_known_jars
from pgcdc_assets.spark.java import check_java
from pgcdc_assets.spark.settings import embedded_conf

_CLASSES = "pgcdc_assets.cli.spark_classes"
_LINES_OF_OUTPUT = 5
_TRACE = "Traceback (most recent call last):"


def prepare_spark() -> tuple[Path, bool]:
    """Resolve Spark's jars, and write the archive of classes, if they are not there.

    Returns:
        The path of the archive, and whether this call wrote the archive.

    Raises:
        ConfigurationError: Java is missing, the jars cannot be resolved, or the folder of the
            archive cannot be written.
    """
    check_java()
    try:
        with locked(archive_folder() / ".lock"):
            conf = with_known_jars(embedded_conf())
            if CLASS_PATH not in conf:
                _resolve()
                conf = with_known_jars(embedded_conf())
            archive = archive_path(conf)
            if archive.exists():
                return archive, False
            _write(archive)
            return archive, True
    except OSError as error:
        raise ConfigurationError(
            reason=f"The archive of Java classes cannot be written ({error.strerror or error}). "
            "Set XDG_CACHE_HOME to a folder that this user can write"
        ) from error


def _resolve() -> None:
    """Start a session in a process of its own, which remembers its jars."""
    _run(["-c", "from pgcdc_assets.spark.session import spark_session; spark_session('pgcdc')"])


def _write(archive: Path) -> None:
    """Write an archive, and delete those that have not been used for the longest time."""
    with tempfile.TemporaryDirectory(dir=archive.parent) as scratch:
        draft = Path(scratch) / "classes.jsa"
        _run(["-m", _CLASSES, str(draft)])
        draft.rename(archive)
    delete_unused_archives()


def _run(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        # Without the stack trace, whose lines begin with blanks.
        lines = [line for line in done.stdout.splitlines() if line.strip() == line != _TRACE]
        said = " / ".join(lines[-_LINES_OF_OUTPUT:])
        raise ConfigurationError(reason=f"Spark cannot be prepared: {said}")
