"""`pgcdc spark` and its Spark server, through the real command line.

The tests share a clone and its server, because the start of a JVM takes long. A test that needs a
running server starts it if no test before has, so each test passes alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.local import is_locked
from pgcdc_assets.processes import ProcessIdentity
from pgcdc_assets.spark.server import SparkServer
from pgcdc_assets.spark.server_process import RunningServer
from pgcdc_assets_tests.spark.test_java import write_java
from pgcdc_assets_tests.support.database import Database, create_database, drop_database
from pgcdc_assets_tests.support.waits import wait_until

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.spark, pytest.mark.slow]

PASSWORD = "spark.hadoop.javax.jdo.option.ConnectionPassword"
VALUE = "#sesame!=:,'\"\\u0041\\\n\t é\U0001f600"
START = ("spark", "start", "--memory", "1g", "--conf", f"{PASSWORD}={VALUE}")


def unexpected_lines(error_output: str) -> list[str]:
    """Return the lines of a command's output that are neither progress nor an error."""
    own = re.compile(r"\d\d:\d\d:\d\d |pgcdc: ")
    return [line for line in error_output.splitlines() if not own.match(line)]


class Clone:
    """A copy of the package with its own state folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "pgcdc_assets", folder / "pgcdc_assets", ignore=ignore)
        shutil.copy(ROOT / "pyproject.toml", folder)
        self.server = SparkServer(folder / ".pgcdc")
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("PGCDC_", "SPARK_"))},
            "PYTHONPATH": str(folder),
            "DAGSTER_HOME": str(folder / "dagster"),
            "PGCDC_LAKE": str(folder / "lake"),
            # Disable the C2 compiler, which needs minutes to have an effect.
            "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1",
        }
        (folder / "dagster").mkdir()

    def begin(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start a command."""
        return subprocess.Popen(
            [sys.executable, "-m", "pgcdc_assets.cli", *arguments],
            cwd=self.folder,
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def pgcdc(self, *arguments: str, **environment: str) -> str:
        """Run a command that succeeds; return its output and errors."""
        return self.end(0, self.begin(*arguments, **environment))

    def end(self, status: int, process: subprocess.Popen[str]) -> str:
        """Wait until a command ends with a status; return its output and errors."""
        out, error = process.communicate(timeout=280)
        assert process.returncode == status, out + error
        assert unexpected_lines(error) == []
        return out + error

    def running(self) -> RunningServer:
        """Return the running server; start it if necessary."""
        if self.server.usable() is None:
            self.pgcdc(*START)
        found = self.server.find()
        assert found is not None
        return found


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clone]:
    made = Clone(tmp_path_factory.mktemp("clone"))
    try:
        yield made
    finally:
        made.server.stop()


@pytest.fixture
def database18(server18: EmbeddedServer) -> Iterator[Database]:
    """Create a database. The fixture `database` has parameters, which change the order of tests."""
    made = create_database(server18)
    try:
        yield made
    finally:
        drop_database(made)


def java_of(folder: Path) -> list[psutil.Process]:
    """Return the server processes and start scripts with files below a folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(str(folder) in part for part in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.sampled
def test_an_interrupted_start_leaves_no_process(clone: Clone) -> None:
    clone.server.stop()
    for number in (signal.SIGINT, signal.SIGTERM):
        starting = clone.begin("spark", "start", "--memory", "1g")
        wait_until(lambda: clone.server.find() is not None, "the process", limit_seconds=60)
        starting.send_signal(number)
        starting.communicate(timeout=60)
        assert starting.returncode == 130
        assert java_of(clone.folder) == []
        assert not clone.server.state_file.exists()


@pytest.mark.sampled
def test_an_interrupted_start_of_dev_leaves_no_process(clone: Clone) -> None:
    clone.server.stop()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    dev = subprocess.Popen(
        [sys.executable, "-m", "pgcdc_assets.demo", "dev", "--port", port],
        cwd=clone.folder,
        env=clone.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_until(lambda: clone.server.find() is not None, "the process", limit_seconds=60)
    dev.send_signal(signal.SIGTERM)
    assert dev.wait(timeout=60) == 0
    assert java_of(clone.folder) == []


@pytest.mark.sampled
def test_a_failed_start_is_one_sentence_with_the_cause(clone: Clone, tmp_path: Path) -> None:
    clone.server.stop()
    said = clone.end(2, clone.begin("spark", "start", JAVA_HOME="/no/such/java"))
    assert "JAVA_HOME is /no/such/java" in said
    write_java(tmp_path, "17.0.1", status_of_others=1)
    said = clone.end(2, clone.begin("spark", "start", JAVA_HOME=str(tmp_path)))
    assert "ended with status 1" in said
    assert "spark-server.log" in said
    too_large = ("--memory", "1g", "--conf", "spark.driver.extraJavaOptions=-Xms2g")
    said = clone.end(2, clone.begin("spark", "start", *too_large))
    assert "Initial heap size set to a larger value" in said
    assert not clone.server.state_file.exists()


@pytest.mark.sampled
def test_two_concurrent_starts_share_one_server(clone: Clone) -> None:
    clone.server.stop()
    both = [clone.begin(*START) for _ in range(2)]
    said = sorted("".join(each.communicate(timeout=280)) for each in both)
    assert [each.returncode for each in both] == [0, 0], said
    outcomes = sorted(re.findall(r"^(Started|Already running): ", "".join(said), re.MULTILINE))
    assert outcomes == ["Already running", "Started"]
    assert len(java_of(clone.folder)) == 1
    assert "-Xmx1g" in psutil.Process(clone.running().pid).cmdline()


@pytest.mark.sampled
def test_status_shows_address_process_uptime_and_memory_without_the_token(clone: Clone) -> None:
    running = clone.running()
    said = clone.pgcdc("spark", "status")
    assert f"sc://localhost:{running.port}" in said
    assert f"process {running.pid}" in said
    assert re.search(r"up (\d+ min )?\d+ s, [\d,]+ MB", said)
    for text in (said, " ".join(psutil.Process(running.pid).cmdline())):
        assert running.token not in text
    assert clone.server.state_file.stat().st_mode & 0o077 == 0


def test_a_setting_of_a_server_is_on_no_command_line_and_in_no_file(clone: Clone) -> None:
    from pyspark.sql.connect.session import SparkSession

    server = psutil.Process(clone.running().pid)
    for process in [server, *server.children(recursive=True)]:
        # A child may have ended. The server itself runs.
        with suppress(psutil.NoSuchProcess):
            assert "sesame" not in "\n".join([*process.cmdline(), *process.environ().values()])
    files = [path for path in clone.server.folder.rglob("*") if path.is_file()]
    assert not [path for path in files if b"sesame" in path.read_bytes()]
    session = SparkSession.builder.remote(clone.running().remote).create()
    assert session.conf.get(PASSWORD) == VALUE
    session.stop()


_KILLED_START = """
import os, signal, sys
from pathlib import Path
from pgcdc_assets.spark import server

def launch_and_end(*arguments):
    launch(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)

launch, server.launch = server.launch, launch_and_end
server.SparkServer(Path(sys.argv[1])).start()
"""


def test_a_start_that_is_killed_before_its_record_leaves_no_process(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _KILLED_START, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    try:
        wait_until(lambda: java_of(tmp_path) == [], "the process to end", limit_seconds=20)
    finally:
        for process in java_of(tmp_path):
            process.kill()


def test_the_server_is_local_and_refuses_clients_without_a_token(
    clone: Clone,
) -> None:
    from pyspark.errors import PySparkException
    from pyspark.sql.connect.session import SparkSession

    running = clone.running()
    listening = {
        each.laddr.ip
        for each in psutil.Process(running.pid).net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    }
    assert {address.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}
    for address in (running.address, f"{running.address}/;token=guessed"):
        other = SparkSession.builder.remote(address).create()
        with pytest.raises(PySparkException):
            other.sql("select 1").collect()
        other.stop()


@pytest.mark.sampled
@pytest.mark.parametrize(("master", "status"), [("spark://master:7077", 0), ("local[2]", 1)])
def test_the_test_query_of_a_cluster_needs_no_folder_of_this_machine(
    clone: Clone, tmp_path: Path, master: str, status: int
) -> None:
    running = clone.running()
    (tmp_path / "file").touch()
    request = {
        "remote": running.remote,
        "port": running.port,
        "folder": str(tmp_path / "file"),
        "conf": {"spark.master": master},
    }
    probe = [sys.executable, "-m", "pgcdc_assets.spark.readiness_probe"]
    done = subprocess.run(
        probe, input=json.dumps(request), capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stderr


@pytest.mark.soak
@pytest.mark.postgres
def test_sync_merges_on_the_running_server_and_the_tables_equal_the_source(
    clone: Clone, database18: Database
) -> None:
    """Without Java in the PATH, an embedded session could not start."""
    database = database18
    database.execute("create table t (id int primary key, v text)")
    database.execute("insert into t select n, 'row ' || n from generate_series(1, 20) n")
    database.execute("create publication pub for table t")
    source = {"PGCDC_DSN": database.conninfo}
    without_java = {**source, "JAVA_HOME": "/no/such/java"}
    slot = f"s_{database.name}"
    clone.pgcdc("init", "--name", "t", "--publication", "pub", "--slot", slot, **source)
    clone.pgcdc("sync", "--name", "t", **without_java)
    database.execute("update t set v = v || '!' where id < 5; delete from t where id = 6")
    clone.pgcdc("sync", "--name", "t", **without_java)
    clone.pgcdc("verify", "--name", "t", **without_java)

    database.execute("insert into t values (99, 'during a kill')")
    remote = clone.running().remote
    syncing = clone.begin("sync", "--name", "t", **without_java, PGCDC_SPARK_REMOTE=remote)
    assert syncing.stderr is not None
    said = ""
    while "start of the Spark session: " not in said and (line := syncing.stderr.readline()):
        said += line
    os.kill(clone.running().pid, signal.SIGKILL)
    said += syncing.communicate(timeout=120)[1]
    assert syncing.returncode == 3, said
    assert unexpected_lines(said) == []
    log = Path(said.strip().rpartition(" is in ")[2])
    assert log.is_file()

    database.execute("insert into t values (100, 'later')")
    embedded = {**without_java, "PGCDC_SPARK_REMOTE": "local"}
    said = clone.end(2, clone.begin("sync", "--name", "t", **embedded))
    assert "JAVA_HOME is /no/such/java" in said


@pytest.mark.sampled
def test_a_killed_server_is_recognised_and_restarted(clone: Clone) -> None:
    killed = clone.running().pid
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: clone.server.find() is None, "the server to be gone")
    assert "No Spark server is running" in clone.pgcdc("spark", "status")
    assert clone.server.usable() is None
    assert "Started" in clone.pgcdc(*START)
    assert clone.running().pid != killed


def test_stop_ends_the_process_deletes_its_files_and_may_be_repeated(clone: Clone) -> None:
    running = clone.running()
    assert running.identity == ProcessIdentity.of(running.pid)
    assert clone.server.alive_file.exists() and is_locked(clone.server.alive_file)
    assert f"process {running.pid}" in clone.pgcdc("spark", "stop")
    assert not psutil.pid_exists(running.pid)
    assert java_of(clone.folder) == []
    assert not clone.server.state_file.exists()
    assert not clone.server.alive_file.exists()
    assert not clone.server.work_folder.exists()
    assert "No Spark server is running" in clone.pgcdc("spark", "stop")


def test_a_reused_pid_is_neither_used_nor_ended(tmp_path: Path) -> None:
    server = SparkServer(tmp_path)
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    state = {"pid": other.pid, "port": 1, "token": "t", "started_at": time.time()}
    server.state_file.write_text(json.dumps({**state, "ready": True}))
    try:
        assert server.find() is None
        assert server.stop() is None
        assert other.poll() is None
        assert not server.state_file.exists()
    finally:
        other.communicate(b"\n")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', '{"pid": null, "what": 2}'])
def test_a_malformed_state_file_means_no_server(tmp_path: Path, text: str) -> None:
    server = SparkServer(tmp_path)
    server.state_file.write_text(text)
    assert server.find() is None


def test_a_python_without_the_server_is_an_error_with_the_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="pyspark"):
        SparkServer(tmp_path).start()
    assert not list(tmp_path.glob("*.json"))
