"""The JVM of an embedded session gets its settings, and other users cannot read them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_a_jvm_whose_launch_ends_at_once_is_launched_again(tmp_path: Path) -> None:
    found = importlib.util.find_spec("pyspark")
    assert found is not None
    assert found.origin is not None
    spark_home = Path(found.origin).parent
    for each in spark_home.iterdir():
        if each.name != "bin":
            (tmp_path / each.name).symlink_to(each)
    (tmp_path / "bin").mkdir()
    for each in (spark_home / "bin").iterdir():
        (tmp_path / "bin" / each.name).symlink_to(each)
    submit = tmp_path / "bin" / "spark-submit"
    submit.unlink()
    submit.write_text(
        "#!/bin/bash\n"
        f"[ -e {tmp_path}/launched ] || {{ touch {tmp_path}/launched; exit 1; }}\n"
        f'exec "{spark_home}/bin/spark-submit" "$@"\n'
    )
    submit.chmod(0o755)
    script = (
        "from pgcdc_assets.spark.session import spark_session\n"
        "print(spark_session('again').range(3).count())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "SPARK_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "3"), done.stderr[-2000:]
    assert (tmp_path / "launched").exists()
