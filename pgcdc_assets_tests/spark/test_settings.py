"""The options of the JVM of embedded sessions and of the server, as the JVM reads the options."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from pgcdc_assets.spark.class_archive import JAVA_OPTIONS
from pgcdc_assets.spark.java import find_java
from pgcdc_assets.spark.settings import embedded_conf, server_conf, with_user_conf

MASTERS = (None, "local", "local[4]", "spark://host:7077", "yarn", "k8s://host")
# A method that is called so often, or has so many loops, is compiled by C2.
THRESHOLDS = ("Invocation", "MinInvocation", "Compile", "BackEdge")


def jvm_flags(options: str) -> dict[str, str]:
    """Return the flags of a JVM with these options."""
    java = find_java()
    assert java is not None
    done = subprocess.run(
        [java, *options.split(), "-XX:+PrintFlagsFinal", "-version"],
        # Not the options of the tests, which disable C2.
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(re.findall(r"^ *\w+ (\w+) += (\S*)", done.stdout, re.MULTILINE))


@pytest.mark.parametrize("cores", [2, 3])
def test_c1_compiles_small_work_and_c2_hot_code_only(
    cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decision 78: the same options for embedded sessions and servers, and for all masters."""
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    confs = [embedded_conf(master) for master in MASTERS]
    confs += [server_conf(1, "/f", master) for master in MASTERS]
    (options,) = {conf[JAVA_OPTIONS] for conf in confs}
    flags, defaults = jvm_flags(options), jvm_flags("")
    assert (flags["TieredCompilation"], flags["TieredStopAtLevel"]) == ("true", "4")
    for name in THRESHOLDS:
        flag = f"Tier4{name}Threshold"
        assert int(flags[flag]) >= 10 * int(defaults[flag]), flag
        # C1 starts as soon as by default.
        assert flags[flag.replace("4", "3")] == defaults[flag.replace("4", "3")]
    assert flags["UseSerialGC"] == ("true" if cores == 2 else defaults["UseSerialGC"])
    # Executors run the large merges of a cluster, with the JVM's own options.
    assert not any("spark.executor.extraJavaOptions" in conf for conf in confs)
    assert with_user_conf(confs[0], {JAVA_OPTIONS: "-Xmn1g"})[JAVA_OPTIONS] == "-Xmn1g"
