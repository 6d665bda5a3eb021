"""The JVM of an embedded session gets its settings, and other users cannot read them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pgcdc_assets.cli.spark_prepare import prepare_spark
from pgcdc_assets.errors import ConfigurationError

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.sampled]

PASSWORD = "spark.hadoop.javax.jdo.option.ConnectionPassword"
SETTINGS = {
    PASSWORD: "sesame#!=:,'\"\\u0041\\\n\t é\U0001f600",
    "spark.hadoop.test.blanks": "  sesame ",
    "spark.hadoop.test.comment": "#sesame",
    "spark.hadoop.test.empty": "",
    "spark.driver.memory": "701m",
}

_SESSION = """
import json, sys
from contextlib import suppress
import psutil
from pgcdc_assets.spark.session import spark_session
asked = json.load(sys.stdin)
spark = spark_session("test", conf=asked["conf"])
jvm = psutil.Process(spark.sparkContext._gateway.proc.pid)
shown = [(jvm.cmdline(), jvm.environ())]
for child in jvm.children(recursive=True):
    # A child may have ended.
    with suppress(psutil.NoSuchProcess):
        shown.append((child.cmdline(), child.environ()))
print(json.dumps({
    "command lines": [each for each, _ in shown],
    "variables": [each for _, each in shown],
    "values": {name: spark.conf.get(name, None) for name in asked["names"]},
}))
"""


@pytest.mark.parametrize("own", [None, "--properties-file", "--extra-properties-file"])
def test_settings_of_a_session_are_on_no_command_line(tmp_path: Path, own: str | None) -> None:
    """The files of Spark and of the user have an effect too, on the settings that remain."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "tmp").mkdir()
    (tmp_path / "conf" / "spark-defaults.conf").write_text("spark.test.defaults there\n")
    (tmp_path / "own.conf").write_text("spark.test.own there\nspark.driver.memory 555m\n")
    environment = {
        **os.environ,
        "SPARK_CONF_DIR": str(tmp_path / "conf"),
        "TMPDIR": str(tmp_path / "tmp"),
    }
    other = "spark.test.defaults" if own is None else "spark.test.own"
    if own is not None:
        environment["PYSPARK_SUBMIT_ARGS"] = f"{own} {tmp_path}/own.conf pyspark-shell"
    done = subprocess.run(
        [sys.executable, "-c", _SESSION],
        input=json.dumps({"conf": SETTINGS, "names": [*SETTINGS, other]}),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["values"] == {**SETTINGS, other: "there"}
    assert "-Xmx701m" in found["command lines"][0]
    assert "sesame" not in json.dumps([found["command lines"], found["variables"]])
    assert list((tmp_path / "tmp").glob("pgcdc-spark-*")) == []


def _replace_submit(folder: Path, script: str) -> None:
    """Make a copy of PySpark's home with another `spark-submit`."""
    found = importlib.util.find_spec("pyspark")
    assert found is not None
    assert found.origin is not None
    spark_home = Path(found.origin).parent
    for each in spark_home.iterdir():
        if each.name != "bin":
            (folder / each.name).symlink_to(each)
    (folder / "bin").mkdir()
    for each in (spark_home / "bin").iterdir():
        (folder / "bin" / each.name).symlink_to(each)
    submit = folder / "bin" / "spark-submit"
    submit.unlink()
    submit.write_text(script.format(folder=folder, submit=spark_home / "bin" / "spark-submit"))
    submit.chmod(0o755)


def _run(script: str, spark_home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "SPARK_HOME": str(spark_home)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_jvm_whose_launch_ends_at_once_is_launched_again(tmp_path: Path) -> None:
    _replace_submit(
        tmp_path,
        "#!/bin/bash\n"
        "[ -e {folder}/launched ] || {{ touch {folder}/launched; exit 1; }}\n"
        'exec "{submit}" "$@"\n',
    )
    script = (
        "from pgcdc_assets.spark.session import spark_session\n"
        "print(spark_session('again').range(3).count())\n"
    )
    done = _run(script, tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, "3"), done.stderr[-2000:]
    assert (tmp_path / "launched").exists()


_BROKEN = """#!/bin/bash
echo started >> {folder}/launched
echo "Module jdk.incubator.vector not found" >&2
exit 1
"""


def test_a_jvm_that_cannot_start_is_an_error_with_the_java_and_the_remedy(tmp_path: Path) -> None:
    _replace_submit(tmp_path, _BROKEN)
    done = _run(
        "from pgcdc_assets.errors import ConfigurationError\n"
        "from pgcdc_assets.spark.session import spark_session\n"
        "try:\n    spark_session('broken')\n"
        "except ConfigurationError as error:\n    print(error)\n",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("Spark did not start, because its JVM (/")
    assert "set JAVA_HOME to the folder of a whole Java 17 or 21" in done.stdout
    assert (tmp_path / "launched").read_text().count("started") == 2


def test_prepare_shows_what_the_jvm_printed_without_a_stack_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").mkdir()
    _replace_submit(tmp_path / "home", _BROKEN)
    monkeypatch.setenv("SPARK_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigurationError, match="incubator") as raised:
        prepare_spark()
    assert "Spark did not start, because its JVM (" in str(raised.value)
    assert "File " not in str(raised.value)


_ENDLESS = """
import os, time
from pathlib import Path
os.closerange(1, 3)
Path("{folder}/pid").write_text(str(os.getpid()))
Path("{folder}/launched").touch()
time.sleep(600)
"""
_INTERRUPTED = """
import os, signal, threading, time
from pathlib import Path
from pgcdc_assets.spark.session import spark_session

def interrupt():
    while not Path("{folder}/launched").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
try:
    spark_session("interrupted")
except KeyboardInterrupt:
    pass
"""


def test_a_jvm_whose_launch_is_interrupted_ends(tmp_path: Path) -> None:
    """PySpark removes the folder in which the JVM announces its port, and the JVM would stay."""
    _replace_submit(tmp_path, f"#!{sys.executable}\n{_ENDLESS}")
    done = _run(_INTERRUPTED.format(folder=tmp_path), tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    pid = int((tmp_path / "pid").read_text())
    # The parent has ended, so process 1 takes the ended process from the list.
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    is_there = psutil.pid_exists(pid)
    if is_there:
        psutil.Process(pid).kill()
    assert not is_there
