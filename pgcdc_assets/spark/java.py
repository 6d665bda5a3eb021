"""Check of the Java that Spark's scripts use: found by JAVA_HOME or PATH, and new enough."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

from pgcdc_assets.errors import ConfigurationError

OLDEST = 17
_INSTALL = "Install Java 17 or 21 (Debian: apt-get install openjdk-17-jre-headless)"
_SECONDS_TO_ANSWER = 30.0


def find_java() -> str | None:
    """Return the path of the `java` that Spark's scripts would run; None without one."""
    home = os.environ.get("JAVA_HOME", "")
    return os.path.join(home, "bin", "java") if home else shutil.which("java")


def check_java() -> None:
    """Check that Spark can start a JVM on this machine.

    Raises:
        ConfigurationError: Java is missing, does not run, or is too old.
    """
    home = os.environ.get("JAVA_HOME", "")
    program = find_java()
    if program is None:
        raise ConfigurationError(reason=f"Spark needs Java, but no java is on the PATH. {_INSTALL}")
    if not os.access(program, os.X_OK) or os.path.isdir(program):
        raise ConfigurationError(
            reason=f"JAVA_HOME is {home}, but {program} is no program. Set JAVA_HOME to the folder "
            "of Java 17 or 21, or unset JAVA_HOME"
        )
    text = _version_text(program)
    found = re.search(r'version "(?:1\.)?(\d+)', text)
    if found is None:
        raise ConfigurationError(
            reason=f"Spark needs Java, but `{program} -version` prints no version. {_INSTALL}, and "
            "set JAVA_HOME to its folder"
        )
    if int(found[1]) < OLDEST:
        raise ConfigurationError(
            reason=f"Spark needs Java {OLDEST} or newer, but {program} is Java {found[1]}. "
            f"{_INSTALL}, and set JAVA_HOME to its folder"
        )


def _version_text(program: str) -> str:
    try:
        done = subprocess.run(
            [program, "-version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_SECONDS_TO_ANSWER,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace")
