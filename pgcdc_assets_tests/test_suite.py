"""The test run itself: versions of Postgres, seeds, and the distribution to processes."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from pgcdc_assets.local import free_port
from pgcdc_assets_tests.support import coverage_floor
from pgcdc_assets_tests.support.balance import choose_group, group_of, kinds_of
from pgcdc_assets_tests.support.object_store import StoreProxy
from pgcdc_assets_tests.support.postgres_binaries import RELEASES, install, main
from pgcdc_assets_tests.support.sampling import SHARE
from pgcdc_assets_tests.support.server_folder import PREFIX, new_server_folder
from pgcdc_assets_tests.support.spark import CONNECT, EMBEDDED

NOT_INSTALLED = "9"


# The start of a process takes longer than a run of an empty test.
RUNS = """
import json, sys
import pytest
sys.exit(max(pytest.main([*json.loads(run), *sys.argv[2:]]) for run in sys.argv[1].splitlines()))
"""


def run_pytest(
    folder: Path, code: str, *options: str, ci: str = "", runs: Sequence[Sequence[str]] = ((),)
) -> tuple[int, str]:
    """Run pytest on a file with only the fixtures of seeds and servers.

    Args:
        runs: further options of each run.

    Returns:
        The highest status, and the reports.
    """
    (folder / "test_file.py").write_text(f"import pytest\n\n{code}")
    plugins = ("seed", "sampling", "servers")
    fixtures = [each for name in plugins for each in ("-p", f"pgcdc_assets_tests.support.{name}")]
    alone = ["-c", "/dev/null", "--rootdir", str(folder), "-ra"]
    done = subprocess.run(
        [
            *(sys.executable, "-c", RUNS, "\n".join(map(json.dumps, runs))),
            *(*alone, *fixtures, *options, str(folder / "test_file.py")),
        ],
        cwd=Path(__file__).parents[1],
        env={"PATH": "/usr/bin:/bin", "CI": ci},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def sessions_of(said: str) -> list[str]:
    """Split the reports of several runs."""
    return said.split("test session starts")[1:]


ON_A_SERVER = "@pytest.mark.every_pg\ndef test_it(server: object) -> None: ...\n"


def test_a_version_of_postgres_that_is_missing_is_skipped_by_name(tmp_path: Path) -> None:
    status, said = run_pytest(tmp_path, ON_A_SERVER, "--pg", NOT_INSTALLED)
    assert status == 0, said
    assert "Postgres 9 is not installed" in said
    assert "1 skipped" in said


def test_a_short_run_has_one_version_of_a_long_test(tmp_path: Path) -> None:
    code = ON_A_SERVER.replace("every_pg", "every_pg(is_short=False)")
    status, said = run_pytest(tmp_path, code, "--pg=9,8", "-m", "not soak")
    assert status == 0, said
    assert "1 skipped, 1 deselected" in said
    assert "Postgres 9 is not installed" in said


def test_a_version_of_postgres_that_is_missing_fails_in_ci(tmp_path: Path) -> None:
    status, said = run_pytest(tmp_path, ON_A_SERVER, "--pg", NOT_INSTALLED, ci="true")
    assert status == pytest.ExitCode.USAGE_ERROR, said
    assert "[9] are not installed" in said


def test_versions_that_are_not_in_the_package_registry_come_from_maven() -> None:
    assert set(RELEASES) | {16, 18} == {14, 15, 16, 17, 18}
    assert install(18).name == "bin"


def test_the_error_names_a_version_that_cannot_be_installed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([NOT_INSTALLED, "18"]) == 1
    assert "Postgres 9 is not installed" in capsys.readouterr().err


def test_the_report_of_a_failed_random_test_names_its_seed(tmp_path: Path) -> None:
    code = "def test_it(rng: object) -> None:\n    assert False\n"
    status, said = run_pytest(tmp_path, code, "--seed", "4711", "-q")
    assert status == pytest.ExitCode.TESTS_FAILED
    assert "run it again: --seed 4711" in said


def test_a_short_run_has_a_share_of_the_longest_tests_and_some_runs_have_all(
    tmp_path: Path,
) -> None:
    code = f"""
@pytest.mark.parametrize("case", range({2 * SHARE}))
@pytest.mark.sampled
def test_long(case: int) -> None: ...

@pytest.mark.soak
@pytest.mark.sampled
def test_longer() -> None: ...

def test_short() -> None: ...
"""
    every = {f"test_long[{case}]" for case in range(2 * SHARE)}
    seeds = [("-m", "not soak", f"--seed={seed}") for seed in range(SHARE)]
    status, said = run_pytest(tmp_path, code, "-v", runs=[*seeds, ()])
    assert status == 0, said
    *shares, complete = (set(re.findall(r"::(\S+) PASSED", run)) for run in sessions_of(said))
    assert [len(each & every) for each in shares] == [2] * SHARE
    assert set.union(*shares) == every | {"test_short"} == complete - {"test_longer"}


def test_a_short_run_has_half_of_the_tests_of_the_merge_on_each_kind_of_session(seed: int) -> None:
    command = ["-m", "pytest", "--collect-only", "-q", "-m", "not soak", f"--seed={seed}"]
    done = subprocess.run(
        [sys.executable, *command, "-p", "no:cacheprovider", "pgcdc_assets_tests/merge"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    kinds = Counter(re.findall(rf"::\S+\[.*\b({EMBEDDED}|{CONNECT})\b", done.stdout))
    assert kinds.total() > 80
    assert min(kinds[EMBEDDED], kinds[CONNECT]) >= 0.4 * kinds.total()


def test_each_run_has_another_seed(tmp_path: Path) -> None:
    code = "def test_it(seed: int) -> None:\n    print(f'seed {seed}')\n    assert False\n"
    said = [run_pytest(tmp_path, code)[1] for _ in range(2)]
    seeds = [re.findall(r"^random tests: --seed (\d+)$", text, re.M) for text in said]
    assert len(seeds[0]) == len(seeds[1]) == 1
    assert seeds[0] != seeds[1]


def test_all_processes_of_a_run_have_its_seed(tmp_path: Path) -> None:
    code = """
@pytest.mark.parametrize("case", range(4))
def test_it(seed: int, case: int) -> None:
    print(f"seed {seed}")
    assert False
"""
    _, said = run_pytest(tmp_path, code, "-n", "2")
    header = re.findall(r"^random tests: --seed (\d+)$", said, re.M)
    assert len(header) == 1
    assert re.findall(r"^seed (\d+)$", said, re.M) == header * 4


@pytest.mark.parametrize(("covered", "status"), [(1.0, 1), (99.5, 0)])
def test_a_coverage_below_the_floor_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], covered: float, status: int
) -> None:
    report = tmp_path / "coverage.json"
    report.write_text(json.dumps({"summary": {"percent_covered": covered}}))
    assert coverage_floor.main(str(report)) == status
    assert f"{covered} %" in capsys.readouterr().out


EMBEDDED_TEST, CONNECT_TEST, OTHER_TEST = "a.py::t[embedded]", "a.py::t[connect-x]", "b.py::t"


def test_the_tests_on_a_server_are_one_group() -> None:
    assert [group_of(test) for test in (EMBEDDED_TEST, CONNECT_TEST)] == ["a.py", CONNECT]
    # The kind of session is not always the first parameter.
    assert group_of("a.py::t[small-connect-pg18]") == CONNECT
    assert kinds_of({"a.py": ["a.py::t[small-embedded-pg18]"]}) == {EMBEDDED}


def test_each_kind_of_session_has_a_process_and_the_others_begin_without_spark() -> None:
    queue = {"b.py": [OTHER_TEST], "a.py": [EMBEDDED_TEST], CONNECT: [CONNECT_TEST]}
    on_server, on_embedded = (
        kinds_of({CONNECT: queue.pop(CONNECT)}),
        kinds_of({"a.py": queue["a.py"]}),
    )
    assert (on_server, on_embedded) == ({CONNECT}, {EMBEDDED})
    assert choose_group({**queue, CONNECT: [CONNECT_TEST]}, set(), []) == CONNECT
    assert choose_group(queue, set(), [on_server]) == "a.py"
    assert choose_group(queue, on_embedded, [on_server]) == "a.py"
    assert choose_group(queue, set(), [on_server, on_embedded]) == "a.py"
    assert choose_group(queue, set(), [on_server, on_embedded, on_embedded]) == "b.py"
    assert choose_group(queue, on_server, [on_embedded]) == "b.py"
    assert choose_group({"b.py": [OTHER_TEST]}, on_embedded, [on_server]) == "b.py"
    only_embedded = {"a.py": [EMBEDDED_TEST]}
    assert choose_group(only_embedded, set(), [on_server, on_embedded]) == "a.py"
    assert choose_group(only_embedded, set(), [on_server, on_embedded, on_embedded]) is None
    assert choose_group(only_embedded, on_server, [on_embedded]) == "a.py"
    assert choose_group(only_embedded, on_server, [on_embedded, on_embedded]) is None


def test_the_proxy_of_the_s3_server_asks_at_once_for_the_body_of_a_put() -> None:
    """Without the answer, S3A sends the body after three seconds, and each commit takes as long."""
    proxy = StoreProxy(free_port())
    try:
        address = ("127.0.0.1", int(proxy.endpoint.rpartition(":")[2]))
        with socket.create_connection(address, timeout=2) as client:
            client.sendall(
                b"PUT /lake/key HTTP/1.1\r\nHost: s3\r\nContent-Length: 1\r\n"
                b"Expect: 100-continue\r\n\r\n"
            )
            assert client.recv(1000).startswith(b"HTTP/1.1 100 Continue\r\n")
    finally:
        proxy.close()


def test_folders_of_servers_are_in_memory_and_those_of_killed_runs_are_deleted(
    tmp_path: Path,
) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = tmp_path / f"{PREFIX}own-{ended.pid}-abc"
    (left / "data").mkdir(parents=True)
    living = new_server_folder("own", tmp_path)
    assert new_server_folder("pg18", tmp_path).parent == living.parent == tmp_path
    assert living.exists() and not left.exists()


def test_folders_of_servers_are_on_disk_without_much_memory() -> None:
    folder = new_server_folder("own", Path("/proc"))
    folder.rmdir()
    assert folder.parent == Path(tempfile.gettempdir())
