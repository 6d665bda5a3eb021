"""Benchmarks: the fields of a result, the order of the sides, measured processes, and the page."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from deltalake import DeltaTable

from benchmarks import large_tables, results, run
from benchmarks.benchmark import BENCHMARKS
from benchmarks.environment import describe_machine, find_commit
from benchmarks.log_entries import make_table
from benchmarks.page import PAGE, README, generate
from benchmarks.processes import CommandFailedError, run_measured
from benchmarks.results import FIRST, Entry, Result, entry_of, read_entries, save
from benchmarks.soak_samples import growth, growth_result
from benchmarks.summary import SUMMARY
from benchmarks.turns import in_turns
from pgcdc_assets.lsn import Lsn, Position
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.tables.state import read_scd_state
from pgcdc_assets_tests.support.syntax import syntax_tree

_FOLDER = Path(results.__file__).parent
_CONTEXT_FIELDS = {
    "benchmark",
    "date",
    "commit",
    "seconds_of_benchmark",
    "settings",
    "machine",
}
_CONTEXT: Entry = {
    "benchmark": "copy",
    "date": "2026-11-24T12:00:00+00:00",
    "commit": "0123456789ab",
    "seconds_of_benchmark": 7,
    "settings": {"workload": "some rows"},
    "machine": describe_machine(None),
}
# These benchmarks do not repeat, or do not compare two programs that could take turns.
_WITHOUT_TURNS = {
    # One session compares the small table first, because the memory of a JVM hardly shrinks.
    "verify.py",
    # The windows beside the open transaction follow the others in one stream.
    "capture_trickle.py",
    # The last merges of a table are compared with its first ones.
    "merge_repeated.py",
    # A deletion is compared with the merge before it, and used bytes with written bytes.
    "disk.py",
}
_SUMMARY_NAMES = {name for lines in SUMMARY.values() for name, _, _ in lines}
# Unfavourable ratios that the README leaves out.
_NOT_IN_THE_SUMMARY = {
    # The summary has the same copy with its landing, which is slower.
    "table_copy_vs_copy_to_nothing",
    # The summary has the lines of 4 connections, the default of `snapshot.parallelism`.
    "table_copy_1_connection_vs_copy_to_nothing",
    "table_copy_2_connections_vs_copy_to_nothing",
    "hundred_tables_copy_1_connection_vs_copy_to_nothing",
    "hundred_tables_copy_2_connections_vs_copy_to_nothing",
}


@pytest.mark.parametrize("page", [PAGE, README], ids=lambda path: path.name)
def test_the_tables_of_the_page_agree_with_the_results(page: Path) -> None:
    text = page.read_text()
    assert generate(text, read_entries()) == text, "run python -m benchmarks.page"


def test_the_page_has_a_table_for_every_benchmark() -> None:
    text = PAGE.read_text()
    assert [name for name in BENCHMARKS if f"<!-- results: {name} -->" not in text] == []
    assert [name for name in BENCHMARKS if f"ONLY={name}`" not in text] == []


def test_the_readme_has_every_result_that_exceeds_its_limit() -> None:
    exceeding = {
        entry["name"]
        for entry in read_entries()
        if "limit" in entry["unit"] and entry["ratio"] is not None and entry["ratio"] > 1
    }
    assert exceeding - _SUMMARY_NAMES == set()


def is_unfavourable(entry: Entry) -> bool:
    """Return whether ours is slower than the other side, or needs more time, CPU or memory.

    A difference of a tenth is within the range of many benchmarks. Limits have a test of their own.
    """
    if entry["ratio"] is None or "limit" in entry["unit"]:
        return False
    is_rate = entry["unit"].endswith("/s")
    return bool(entry["ratio"] < 0.9 if is_rate else entry["ratio"] > 1.1)


def test_the_readme_has_every_unfavourable_ratio() -> None:
    entries = read_entries()
    unfavourable = {entry["name"] for entry in entries if is_unfavourable(entry)}
    assert unfavourable - _SUMMARY_NAMES - _NOT_IN_THE_SUMMARY == set()
    assert _NOT_IN_THE_SUMMARY - {entry["name"] for entry in entries} == set()
    assert _NOT_IN_THE_SUMMARY & _SUMMARY_NAMES == set()


@pytest.mark.parametrize(
    ("unit", "ours", "expected"),
    [
        ("changes/s", 0.8, True),
        ("changes/s", 5.0, False),
        ("MB", 1.2, True),
        ("s per million changes", 1.2, True),
        ("s", 0.5, False),
        ("s", 1.05, False),
    ],
)
def test_more_is_better_for_rates_only(unit: str, ours: float, expected: bool) -> None:
    entry = entry_of(Result.of("r", [ours], [1.0], unit), _CONTEXT)
    assert is_unfavourable(entry) is expected


def test_the_summary_has_the_machine_of_each_line() -> None:
    on_one = entry_of(Result.reported("sync_cold", [1.0], "s"), _CONTEXT)
    other = {**_CONTEXT, "machine": {**_CONTEXT["machine"], "cpu": "Another", "cores": 10_000}}
    on_other = entry_of(Result.of("table_copy_vs_adbc", [1.0], [1.0], "rows/s"), other)
    table = generate("<!-- results: summary -->\n<!-- end results -->", [on_one, on_other])
    (letter,) = {line.split(" | ")[4] for line in table.splitlines() if "cold" in line}
    (other_letter,) = {line.split(" | ")[4] for line in table.splitlines() if "ADBC" in line}
    assert {letter, other_letter} == {"A", "B"}
    assert f"{other_letter} is 10000 cores, " in table and "Another" in table


def test_every_entry_has_all_fields_and_its_circumstances() -> None:
    entries = read_entries()
    assert entries[0]["name"] == FIRST
    expected = {field.name for field in fields(Result)} | _CONTEXT_FIELDS
    for entry in entries:
        assert set(entry) == expected, entry["name"]
        assert entry["benchmark"] in BENCHMARKS
        assert entry["date"]
        assert entry["machine"]["cores"] >= 1
        assert entry["settings"]["workload"]
        assert entry["minimum"] <= entry["median"] <= entry["maximum"]
    names = [entry["name"] for entry in entries]
    assert len(set(names)) == len(names)


def test_a_result_has_its_range_day_and_commit_on_the_page() -> None:
    entry = entry_of(Result.reported("table_copy_peak_memory", [1.0, 2.0, 3.0], "MB"), _CONTEXT)
    page = "<!-- results: copy -->\n<!-- end results -->"
    assert "2026-11-24, 0123456789ab" in generate(page, [entry])
    assert "| 2.0 (1.00 to 3.0) |" in generate(page, [entry])


def test_an_unfavourable_result_is_in_the_summary() -> None:
    slower = Result.of("table_copy_vs_adbc", [10.0, 12.0, 11.0], [20.0, 22.0, 21.0], "rows/s")
    page = "<!-- results: summary -->\n<!-- end results -->"
    assert "| 0.52 |" in generate(page, [entry_of(slower, _CONTEXT)])


def test_a_result_has_median_minimum_and_maximum_of_both_sides() -> None:
    result = Result.of("r", [3.0, 1.0, 2.0], [4.0, 8.0, 5.0], "s")
    assert (result.ours, result.minimum, result.median, result.maximum) == (2.0, 1.0, 2.0, 3.0)
    assert (result.baseline_minimum, result.baseline, result.baseline_maximum) == (4.0, 5.0, 8.0)
    assert (result.ratio, result.repetitions) == (0.4, 3)
    percentile = Result.against_limit("p", [1.0, 2.0, 9.0], 10, "s", value=8.5)
    assert (percentile.ours, percentile.ratio, percentile.median) == (8.5, 0.85, 2.0)


def test_a_run_replaces_the_results_of_its_benchmark_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results.json")
    gone, kept, new = (Result.reported(name, [1.0], "s") for name in ("gone", "kept", "new"))
    save([entry_of(kept, {**_CONTEXT, "benchmark": "merge"})])
    save([entry_of(gone, _CONTEXT)])
    save([entry_of(new, _CONTEXT), entry_of(Result.reported(FIRST, [1.0], "s"), _CONTEXT)])
    assert [entry["name"] for entry in read_entries()] == [FIRST, "kept", "new"]


@pytest.mark.parametrize(
    ("idle", "seconds", "busy"), [([98.0], 5, 2.0), ([3.0, 50.0, 95.0], 15, 5.0), ([40.0], 300, 60)]
)
def test_a_benchmark_waits_until_the_machine_is_idle(
    idle: list[float], seconds: float, busy: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def sample(interval: float) -> SimpleNamespace:
        nonlocal now
        now += interval
        return SimpleNamespace(idle=idle.pop(0) if len(idle) > 1 else idle[0])

    monkeypatch.setattr(psutil, "cpu_times_percent", sample)
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: now))
    assert run.wait_until_idle() == busy
    assert now == seconds


def test_each_repetition_begins_with_another_side() -> None:
    order: list[str] = []
    sides = {name: (lambda name=name: order.append(name)) for name in "abc"}
    for number in range(4):
        in_turns(sides, number)
    assert "".join(order) == "abcbcacababc"


def test_every_benchmark_that_compares_lets_the_sides_take_turns() -> None:
    without = set()
    for path in _FOLDER.rglob("*.py"):
        tree = syntax_tree(path)
        if "Result.of" in _calls(tree) and not takes_turns(tree):
            without.add(path.name)
    assert without == _WITHOUT_TURNS


def takes_turns(tree: ast.Module) -> bool:
    """Return whether a module calls `in_turns`, or `fold` of sides that have a recipe."""
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    sides = _calls(tree).get("SideBySide", [])
    has_recipes = bool(sides) and not any(map(_has_no_recipe, sides))
    return "in_turns" in _calls(tree) or ("fold" in names and has_recipes)


def _calls(tree: ast.Module) -> dict[str, list[ast.Call]]:
    """Return the calls of a module by the called expression."""
    calls: dict[str, list[ast.Call]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            calls.setdefault(ast.unparse(node.func), []).append(node)
    return calls


def _has_no_recipe(call: ast.Call) -> bool:
    """Return whether a call of `SideBySide` has an empty sequence as its recipes."""
    given = [keyword.value for keyword in call.keywords if keyword.arg == "recipes"]
    return any(isinstance(value, (ast.Tuple, ast.List)) and not value.elts for value in given)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("in_turns(sides, 0)", True),
        ("SideBySide(spark, raw, books).fold(window, 0)", True),
        ("SideBySide(spark, raw, books, ['recipe']).fold(window, 0)", True),
        ("SideBySide(spark, raw, books, recipes=()).fold(window, 0)", False),
        ("fold(window)", False),
    ],
)
def test_a_fold_without_a_recipe_takes_no_turns(code: str, expected: bool) -> None:
    assert takes_turns(ast.parse(code)) is expected


def test_the_growth_of_a_curve_leaves_out_its_first_tenth() -> None:
    curve = [90.0, 90.0, 1.0, 3.0, *[50.0] * 14, 4.0, 6.0]
    assert growth(curve) == (2.0, 5.0)


def test_a_curve_is_one_repetition_with_many_samples() -> None:
    result = growth_result("g", [2.0] * 10 + [3.0] * 10)
    assert (result.repetitions, result.ours) == (1, 1.5)
    assert (result.minimum, result.median, result.maximum) == (1.5, 1.5, 1.5)
    assert result.settings == {"early": "2.000", "late": "3.000", "samples": "20"}


def test_recorded_growths_are_those_of_one_run() -> None:
    of_soak = [entry for entry in read_entries() if entry["benchmark"] == "soak"]
    wrong = [e["name"] for e in of_soak if e["repetitions"] > 1 or "samples" not in e["settings"]]
    assert wrong == []


def test_a_simulated_log_has_all_entries_and_the_newest_file(tmp_path: Path) -> None:
    make_table(str(tmp_path / "t"), 70)
    table = DeltaTable(tmp_path / "t")
    assert (table.version(), table.transaction_version("pgcdc:shop:1")) == (69, 69)
    assert [Path(uri).name for uri in table.file_uris()] == ["part-69.parquet"]
    log = tmp_path / "t" / "_delta_log"
    assert len(list(log.glob("*.json"))) == 70
    assert sorted(int(file.name[:20]) for file in log.glob("*.parquet")) == [59, 64]


def test_a_simulated_large_table_is_read_as_a_real_one_from_its_log_alone(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path))
    path = lake.path(large_tables.NAME, "scd1", "shop", "orders")
    large_tables.make_table(lake, path, 9)
    state = read_scd_state(lake, large_tables.NAME, path)
    assert state is not None
    protocol = state.table.protocol()
    assert (protocol.min_reader_version, protocol.min_writer_version) == (3, 7)
    assert protocol.reader_features == ["deletionVectors"]
    assert (state.watermark, state.fence) == (Position(1, Lsn(100)), 7)
    assert state.is_watermark_recorded and state.has_deletion_vectors
    assert state.row_count == 9 * 1_000_000 - 3 * 1_000
    # No file of rows and no vector exists.
    assert [file.suffix for file in Path(path).iterdir()] == [""]


def test_a_dirty_tree_is_visible_in_the_commit(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=t", "-c", "user.email=t@localhost")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True)

    assert find_commit(tmp_path) is None
    git("init", "--quiet")
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "results.json").write_text("[]")
    (tmp_path / "README.md").write_text("")
    (tmp_path / "code.py").write_text("1")
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    clean = find_commit(tmp_path)
    assert clean is not None and not clean.endswith("-dirty")
    # A benchmark writes its results. The code of the next benchmark is still that of the commit.
    (tmp_path / "benchmarks" / "results.json").write_text("[1]")
    (tmp_path / "README.md").write_text("figures")
    assert find_commit(tmp_path) == clean
    (tmp_path / "code.py").write_text("2")
    assert find_commit(tmp_path) == f"{clean}-dirty"


def test_a_machine_is_described_with_its_versions() -> None:
    machine = describe_machine(18)
    assert machine["cores"] and machine["memory_gb"] and machine["cpu"]
    assert str(machine["postgres"]).startswith("18.")
    assert str(machine["java"]).startswith(("17", "21"))
    assert 5 < int(str(machine["python_loop_ms"])) < 2000
    json.dumps(machine)


_FAMILY = """
import subprocess, sys, time
child = "import time; held = bytearray(150_000_000); end = time.process_time() + 0.4\\n" \
    "while time.process_time() < end: pass\\ntime.sleep(0.5)"
held = bytearray(100_000_000)
subprocess.run([sys.executable, "-c", child], check=True)
print("done")
"""


def test_memory_and_cpu_of_children_are_measured() -> None:
    usage = run_measured([sys.executable, "-c", _FAMILY])
    assert usage.output == "done\n"
    assert usage.seconds > 0.9
    assert usage.cpu_seconds > 0.4
    assert 240 < usage.peak_mb < 400


def test_memory_of_the_measuring_process_is_not_counted() -> None:
    held = bytearray(b"x" * 200_000_000)
    usage = run_measured([sys.executable, "-c", "import time; time.sleep(0.5)"])
    assert len(held) == 200_000_000
    assert 2 < usage.peak_mb < 100


def test_the_error_of_a_measured_command_has_its_output() -> None:
    with pytest.raises(CommandFailedError, match="ended with 3: out of luck"):
        run_measured([sys.executable, "-c", "import sys; print('out of luck'); sys.exit(3)"])


def test_a_measured_command_that_hangs_is_killed_with_its_children() -> None:
    hanging = "import subprocess; subprocess.run(['sleep', '77'])"
    with pytest.raises(CommandFailedError, match="took too long"):
        run_measured([sys.executable, "-c", hanging], limit_seconds=0.5)


_INTERRUPTED = """
import os, signal, threading
from benchmarks.processes import run_measured
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
run_measured(["bash", "-c", "sleep 77 & echo $! > child; wait"])
"""


def test_an_interrupted_benchmark_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _INTERRUPTED]
    environment = {**os.environ, "PYTHONPATH": str(_FOLDER.parent)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "KeyboardInterrupt" in done.stderr
    child = int((tmp_path / "child").read_text())
    # A killed process may wait for init to reap it.
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
