"""Test the mutants of a scope: `python -m pgcdc_assets_tests.mutation --scope protocol`.

Scopes are in pyproject.toml. Verdicts are stored in `.pgcdc/mutation`, so that a run continues
after the previous run. A change of a module invalidates the verdicts on its mutants. After a change
of tests, `--again` tests the survivors again.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from pgcdc_assets_tests.mutation.mutants import Mutant, mutants_of

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".pgcdc" / "mutation"
JUDGED = Path(__file__).with_name("equal_in_effect.toml")
UNNOTICED = ("survived", "not reached")
_HUNG_AFTER_SECONDS = 900
# A process that ends early loses the time of its start only.
_MUTANTS_OF_A_PROCESS = 500
# Number of the last mutants before a crash that are tested again alone.
_SUSPECTS = 3


@dataclass(frozen=True)
class Scope:
    """Modules to mutate, tests to run, and options of pytest."""

    name: str
    modules: list[str]
    tests: list[str]
    options: list[str] = field(default_factory=list)

    @property
    def paths(self) -> list[Path]:
        """Return the files to mutate."""
        found: list[Path] = []
        for name in self.modules:
            path = ROOT / name
            found += sorted(path.rglob("*.py")) if path.is_dir() else [path]
        return found


def read_scopes() -> dict[str, Scope]:
    """Read the scopes of pyproject.toml."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mutation"]
    return {name: Scope(name, **values) for name, values in settings.items()}


def main() -> None:
    """Test mutants, and print the mutants that survive."""
    scopes = read_scopes()
    parser = argparse.ArgumentParser(prog="mutation", description=__doc__.partition("\n")[0])
    parser.add_argument("--scope", default="protocol", help=f"of {', '.join(scopes)}")
    parser.add_argument("--only", default="", help="only mutants of files whose path has this text")
    parser.add_argument("--sample", type=int, help="size of a random sample of mutants")
    parser.add_argument("--seed", type=int, help="seed of the sample, to repeat a sample")
    parser.add_argument("--seconds", type=float, default=10**6, help="time limit")
    parser.add_argument("--sql", action="store_true", help="only mutants of the SQL in strings")
    parser.add_argument("--import-time", action="store_true", help="only code run at import")
    parser.add_argument("--again", action="store_true", help="test only survivors again")
    parser.add_argument("--list", action="store_true", help="print the mutants without tests")
    arguments = parser.parse_args()
    run = Run(scopes[arguments.scope])
    mutants = [
        mutant
        for path in run.scope.paths
        if arguments.only in str(path)
        for mutant in mutants_of(ROOT, path)
        if (mutant.is_sql or not arguments.sql) and not (mutant.function and arguments.import_time)
    ]
    if arguments.sample is not None:
        count = min(arguments.sample, len(mutants))
        seed = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
        print(f"{count} of {len(mutants)} mutants; to draw them again: --seed {seed}")
        # In random order, so that the mutants tested before a time limit are a random sample too.
        mutants = random.Random(seed).sample(mutants, count)
    if arguments.again:
        verdicts = run.verdicts()
        mutants = [m for m in mutants if verdicts.get(m.key, {}).get("verdict") in UNNOTICED]
    if arguments.list:
        for mutant in mutants:
            print(describe(mutant))
        return
    run.go(mutants, time.monotonic() + arguments.seconds, is_again=arguments.again)
    run.report(mutants)


class Run:
    """The stored verdicts of a scope, and the processes that find further verdicts."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self._home = HOME / scope.name
        self._home.mkdir(parents=True, exist_ok=True)
        self._verdicts_file = self._home / "verdicts.jsonl"
        self._tests_file = self._home / "tests.jsonl"

    def go(self, mutants: list[Mutant], deadline: float, *, is_again: bool) -> None:
        """Test the mutants without a verdict."""
        tests = self._observed_tests()
        if is_again:
            for mutant in mutants:
                self._append({"key": mutant.key, "verdict": "not tried"})
        # The mutants that are equal in effect come last, because all their tests run.
        judged = read_judged()
        mutants = sorted(mutants, key=lambda mutant: mutant.judgement in judged)
        verdict_count = -1
        while time.monotonic() < deadline:
            verdicts = self.verdicts()
            # Alone, also a mutant with a lasting effect gets a verdict.
            limit = _MUTANTS_OF_A_PROCESS if len(verdicts) > verdict_count else 1
            verdict_count = len(verdicts)
            left = [mutant for mutant in mutants if mutant.key not in verdicts]
            in_place = [mutant for mutant in left if mutant.function]
            batch = in_place or left
            if not batch:
                return
            crashed = self._try(batch[:limit], tests, deadline)
            # Again, each alone: a mutant may damage the memory so that a later one crashes.
            for key in crashed[: -_SUSPECTS - 1 : -1]:
                alone = [mutant for mutant in batch if mutant.key == key]
                if self._try(alone, tests, deadline):
                    self._append({"key": key, "verdict": "killed", "test": "process crashed"})
                    break

    def _observed_tests(self) -> dict[str, dict[str, Any]]:
        stamp = _digest([*_files_of(self.scope.tests), *self.scope.paths])
        lines = list(_lines(self._tests_file))
        if not lines or lines[-1].get("stamp") != stamp:
            print("running the tests on the original code", flush=True)
            self._tests_file.unlink(missing_ok=True)
            self._pytest([], None, self._tests_file, {}, 10**6)
            lines = list(_lines(self._tests_file))
        tests = {line["test"]: line for line in lines if "test" in line}
        failing = [
            f"{test['test']} {test['reason']}" for test in tests.values() if not test["is_sound"]
        ]
        if failing or not tests:
            self._tests_file.unlink(missing_ok=True)
            log = self._home / "pytest.log"
            raise SystemExit(
                "\n".join(["tests fail on the original code:", *failing, f"see {log}"])
            )
        if not lines[-1].get("stamp"):
            with self._tests_file.open("a") as file:
                file.write(json.dumps({"stamp": stamp}) + "\n")
        return tests

    def _try(
        self, mutants: list[Mutant], tests: dict[str, dict[str, Any]], deadline: float
    ) -> list[str]:
        """Test mutants in a process. Return the keys of those without a verdict after a crash."""
        by_function = tests_by_function(tests.values())
        seconds = {test: {"seconds": found["seconds"]} for test, found in tests.items()}
        orders: list[dict[str, Any]] = []
        for number, mutant in enumerate(mutants):
            wanted = self._tests_of(mutant, by_function, tests)
            if not wanted:
                self._append({"key": mutant.key, "verdict": "not reached", "test": ""})
                continue
            source = self._home / f"{number}.py"
            source.write_text(mutant.source)
            orders.append(
                {
                    "key": mutant.key,
                    "module": mutant.module,
                    "function": mutant.function,
                    "source_file": str(source),
                    "tests": wanted,
                }
            )
        if not orders:
            return []
        at_import = not mutants[0].function
        wanted_tests = sorted({test for order in orders for test in order["tests"]})
        begun_before = len(self._begun())
        code = self._pytest(
            wanted_tests, orders, self._verdicts_file, seconds, deadline, at_import=at_import
        )
        begun = self._begun()[begun_before:]
        if code > 0 or not begun:
            if time.monotonic() > deadline:
                return []
            raise SystemExit(f"the tests ended with {code}: see {self._home / 'pytest.log'}")
        verdicts = self.verdicts()
        return [key for key in begun if key not in verdicts] if code < 0 else []

    def _begun(self) -> list[str]:
        """Return the keys of the mutants whose tests have begun."""
        return [line["begun"] for line in _lines(self._verdicts_file) if "begun" in line]

    def _tests_of(
        self,
        mutant: Mutant,
        by_function: dict[str, list[str]],
        tests: dict[str, dict[str, Any]],
    ) -> list[str]:
        if mutant.function:
            found = by_function.get(f"{mutant.module}:{mutant.function}", [])
            path = str(ROOT / mutant.path)
            return [
                test
                for test in found
                if not mutant.statement or set(mutant.statement) & set(tests[test]["lines"][path])
            ]
        prefix = f"{mutant.module}:"
        reaching = {
            test
            for function, found in by_function.items()
            if function.startswith(prefix)
            for test in found
        }
        # The methods that a dataclass gets do not count as functions of its module.
        importing = {test for test in tests if _imports(test.partition("::")[0], mutant.module)}
        return sorted(reaching | importing, key=lambda test: float(tests[test]["seconds"]))

    def _pytest(
        self,
        tests: list[str],
        orders: list[dict[str, Any]] | None,
        out: Path,
        observed: dict[str, dict[str, Any]],
        deadline: float,
        *,
        at_import: bool = False,
    ) -> int:
        """Run a process, and kill the process and its children if it hangs.

        Return its exit status.
        """
        order = self._home / "order.json"
        found = {
            "mutants": orders,
            "out": str(out),
            "seconds": max(deadline - time.monotonic(), 0),
            "tests": observed,
            "paths": [str(path) for path in self.scope.paths],
            "options": self.scope.options,
        }
        order.write_text(json.dumps(found))
        hooks = Path(__file__).with_name("subprocesses")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line"]
        command += ["-p", "pgcdc_assets_tests.mutation.plugin", *self.scope.options]
        command += tests or self.scope.tests
        if at_import:
            command = [sys.executable, "-m", "pgcdc_assets_tests.mutation.reimport"]
        with (
            (self._home / "pytest.log").open("w") as log,
            tempfile.TemporaryDirectory(
                "", "pgcdc-mutation-", ignore_cleanup_errors=True
            ) as folder,
        ):
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    "PYTHONPATH": f"{ROOT}:{hooks}",
                    "PYTHONDONTWRITEBYTECODE": "1",
                    "PGCDC_MUTATION_ORDER": str(order),
                    "TMPDIR": folder,
                },
            )
            size, changed_at = -1, time.monotonic()
            while process.poll() is None:
                time.sleep(0.2)
                if out.exists() and out.stat().st_size != size:
                    size, changed_at = out.stat().st_size, time.monotonic()
                if time.monotonic() - changed_at > _HUNG_AFTER_SECONDS:
                    _end(process)
                    begun = [line["begun"] for line in _lines(out) if "begun" in line]
                    if orders and begun:
                        self._append({"key": begun[-1], "verdict": "timeout", "test": "hung"})
            _end_servers(Path(folder))
        return process.returncode

    def _append(self, found: dict[str, Any]) -> None:
        with self._verdicts_file.open("a") as file:
            file.write(json.dumps(found) + "\n")

    def verdicts(self) -> dict[str, dict[str, Any]]:
        """Return the newest verdict of each mutant."""
        last = {line["key"]: line for line in _lines(self._verdicts_file) if "verdict" in line}
        return {key: line for key, line in last.items() if line["verdict"] != "not tried"}

    def report(self, mutants: list[Mutant]) -> None:
        """Print the figures, and the mutants that survive."""
        verdicts = self.verdicts()
        judged = read_judged()
        counts: Counter[str] = Counter()
        for mutant in mutants:
            found = verdicts.get(mutant.key)
            verdict = "not tried" if found is None else found["verdict"]
            if verdict in UNNOTICED:
                reason = judged.get(mutant.judgement)
                if reason is None:
                    print(f"{verdict}: {describe(mutant)}")
                else:
                    verdict = "equal in effect"
            counts[verdict] += 1
        found_count = counts["killed"] + counts["timeout"]
        print(
            f"{self.scope.name}: {len(mutants)} mutants, {found_count} killed "
            f"({counts['timeout']} by a time limit), {counts['survived']} survived, "
            f"{counts['equal in effect']} equal in effect, {counts['not reached']} not reached by "
            f"the tests, {counts['not tried']} not tried"
        )


@functools.cache
def _imports(path: str, module: str) -> bool:
    return f"from {module} import " in (ROOT / path).read_text()


def tests_by_function(tests: Iterable[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the tests that call each function, the fastest test first."""
    found: dict[str, list[str]] = {}
    for test in sorted(tests, key=lambda test: float(test["seconds"])):
        for function in test["functions"]:
            found.setdefault(function, []).append(test["test"])
    return found


def read_judged() -> dict[tuple[str, str, str], str]:
    """Read the mutants that are equal in effect to the original, with the reasons."""
    entries = tomllib.loads(JUDGED.read_text()).get("mutant", []) if JUDGED.exists() else []
    return {(e["module"], e["before"], e["after"]): e["reason"] for e in entries}


def describe(mutant: Mutant) -> str:
    """Print a mutant in one paragraph."""
    return (
        f"{mutant.path}:{mutant.line} {mutant.function}\n    - {mutant.before}\n"
        f"    + {mutant.after}"
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    children = psutil.Process(process.pid).children(recursive=True)
    for child in [psutil.Process(process.pid), *children]:
        if child.is_running():
            child.kill()
    process.wait()


def _end_servers(folder: Path) -> None:
    """End the Postgres servers of a process that has crashed."""
    for file in folder.rglob("postmaster.pid"):
        with suppress(psutil.NoSuchProcess):
            server = psutil.Process(int(file.read_text().split()[0]))
            server.send_signal(signal.SIGQUIT)
            server.wait(60)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        for line in path.read_text().splitlines():
            yield json.loads(line)


def _files_of(tests: list[str]) -> list[Path]:
    found: list[Path] = []
    for name in tests:
        path = ROOT / name.partition("::")[0]
        found += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return found


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
