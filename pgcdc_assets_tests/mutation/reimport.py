"""Test mutants of code that runs at import: a session of pytest for each, all in one process.

For each mutant, the modules of the package and of the tests are imported again. Other packages stay
imported, because to import them takes longer than most tests. `sitecustomize` loads the mutant.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pgcdc_assets_tests.mutation.plugin import PACKAGE, shorten, use_few_examples

_KEPT = "pgcdc_assets_tests.mutation"


class _Recorder:
    """The first failure of a session."""

    def __init__(self) -> None:
        self.test = ""
        self.reason = ""

    def pytest_configure(self) -> None:
        use_few_examples()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            shorten(item)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.test:
            self.test = report.nodeid
            self.reason = str(report.longreprtext).strip().rpartition("\n")[2][:200]


def _run(tests: list[str], options: list[str]) -> tuple[bool, _Recorder]:
    """Run tests on newly imported modules until one fails."""
    for name in list(sys.modules):
        if name.startswith(PACKAGE) and not name.startswith(_KEPT):
            del sys.modules[name]
    recorder = _Recorder()
    arguments = ["-x", "-q", "-p", "no:cacheprovider", "--tb=line", "--timeout=120"]
    # Plugins of pytest stay imported.
    arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    code = pytest.main([*arguments, *options, *tests], plugins=[recorder])
    return code == pytest.ExitCode.OK, recorder


def main() -> None:
    """Test the mutants of an order, and append their verdicts to a file."""
    order: dict[str, Any] = json.loads(Path(os.environ["PGCDC_MUTATION_ORDER"]).read_text())
    deadline = time.monotonic() + order["seconds"]

    def write(**found: Any) -> None:
        with Path(order["out"]).open("a") as file:
            file.write(json.dumps(found) + "\n")

    every = list(dict.fromkeys(test for m in order["mutants"] for test in m["tests"]))
    is_sound, recorder = _run(every, order["options"])
    if not is_sound:
        raise SystemExit(f"tests fail on the original code: {recorder.test} {recorder.reason}")
    for mutant in order["mutants"]:
        if time.monotonic() > deadline:
            return
        write(begun=mutant["key"])
        began = time.monotonic()
        os.environ["PGCDC_MUTANT_MODULE"] = mutant["module"]
        os.environ["PGCDC_MUTANT_SOURCE"] = mutant["source_file"]
        is_alive, recorder = _run(mutant["tests"], order["options"])
        write(
            key=mutant["key"],
            verdict="survived" if is_alive else "killed",
            test=recorder.test or ("" if is_alive else "import"),
            reason=recorder.reason,
            seconds=time.monotonic() - began,
        )


if __name__ == "__main__":
    main()
