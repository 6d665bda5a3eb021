"""The pytest plugin that tests mutants in one session, in which tests run repeatedly.

Without mutants, the plugin records the duration of each test, the functions that it calls and the
lines that it reaches, also in threads. For each mutant, it runs the tests that reach the changed
statement, the fastest first, until a test fails. After some mutants, tests that failed, and have
not passed on a later mutant, run on the original code. If a test fails there too, an earlier mutant
has had a lasting effect, and the verdicts since are discarded.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest
from hypothesis import Phase, settings

PACKAGE = "pgcdc_assets"
# Number of mutants after which failed tests run on the original code.
_CHECKED_EVERY = 30
_EXAMPLES = 25
_RUN_FROM_IMPORT = "PGCDC_MUTANT_SOURCE"
_MODULE = "PGCDC_MUTANT_MODULE"

settings.register_profile(
    "mutation",
    database=None,
    derandomize=True,
    # Do not shrink failing examples, because their result is not shown.
    phases=[Phase.explicit, Phase.generate],
)


def use_few_examples() -> None:
    """Use the settings of Hypothesis for mutants."""
    settings.load_profile("mutation")


def pytest_configure(config: pytest.Config) -> None:
    use_few_examples()
    order = json.loads(Path(os.environ["PGCDC_MUTATION_ORDER"]).read_text())
    config.pluginmanager.register(_Loop(order), "mutation-loop")


class _Loop:
    def __init__(self, order: dict[str, Any]) -> None:
        self._mutants: list[dict[str, Any]] | None = order["mutants"]
        self._paths: list[str] = order["paths"]
        self._out = Path(order["out"])
        self._deadline = time.monotonic() + order["seconds"]
        self._tests: dict[str, dict[str, Any]] = order["tests"]
        self._failed = False
        self._reason = ""
        # The number of mutants of each module that a test has killed.
        self._found: Counter[tuple[str, str]] = Counter()
        # The shortest run of each test that passed.
        self._fastest: dict[str, float] = {}
        # The tests that failed on a mutant and have not passed since.
        self._suspects: set[str] = set()
        folder = Path(tempfile.mkdtemp(prefix="pgcdc-mutant-"))
        self._source = folder / "mutant.py"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self._failed:
            self._failed = True
            self._reason = str(report.longreprtext).strip().rpartition("\n")[2][:200]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted("tests cannot be collected")
        items = {item.nodeid: item for item in session.items}
        for item in items.values():
            shorten(item)
        if self._mutants is None:
            self._observe(session, items)
        else:
            self._try_all(session, items, self._mutants)
        session._setupstate.teardown_exact(None)
        session.testsfailed = 0
        return True

    def _write(self, **found: Any) -> None:
        with self._out.open("a") as file:
            file.write(json.dumps(found) + "\n")

    def _observe(self, session: pytest.Session, items: dict[str, pytest.Item]) -> None:
        for item in items.values():
            with _reached(self._paths) as (functions, lines):
                began = time.monotonic()
                is_sound = self._passes(session, item, 600)
                seconds = time.monotonic() - began
            self._write(
                test=item.nodeid,
                seconds=seconds,
                is_sound=is_sound,
                reason=self._reason,
                functions=sorted(functions),
                lines={path: sorted(found) for path, found in lines.items()},
            )

    def _try_all(
        self, session: pytest.Session, items: dict[str, pytest.Item], mutants: list[dict[str, Any]]
    ) -> None:
        pending: list[dict[str, Any]] = []
        for mutant in mutants:
            if time.monotonic() > self._deadline:
                break
            self._write(begun=mutant["key"])
            found = self._try_one(session, items, mutant)
            pending.append(found)
            is_hung = found["verdict"] == "timeout"
            if len(pending) >= _CHECKED_EVERY or is_hung:
                if not self._settle(session, items, pending, is_hung):
                    return
                pending = []
            if is_hung:
                return
        self._settle(session, items, pending, False)

    def _try_one(
        self, session: pytest.Session, items: dict[str, pytest.Item], mutant: dict[str, Any]
    ) -> dict[str, Any]:
        """Run tests on a mutant until a test fails."""
        began = time.monotonic()
        verdict, killer, reason = "survived", "", ""
        with self._active(mutant):
            for nodeid in self._in_order(mutant):
                usual = self._tests[nodeid]["seconds"]
                limit = 30 + 10 * usual
                start = time.monotonic()
                is_passed = self._passes(session, items[nodeid], limit)
                took = time.monotonic() - start
                if is_passed:
                    self._suspects.discard(nodeid)
                    # The first run of a test compiles and loads what later runs find.
                    self._fastest[nodeid] = min(took, self._seconds_of(nodeid))
                else:
                    is_hung = took >= limit
                    verdict, killer = "timeout" if is_hung else "killed", nodeid
                    if not is_hung:
                        self._suspects.add(nodeid)
                    reason = self._reason
                    self._found[mutant["module"], nodeid] += 1
                    break
        seconds = time.monotonic() - began
        return {
            "key": mutant["key"],
            "verdict": verdict,
            "test": killer,
            "reason": reason,
            "seconds": seconds,
        }

    def _in_order(self, mutant: dict[str, Any]) -> list[str]:
        """Order the tests: first those that killed many mutants of the module in a short time."""

        def cost(nodeid: str) -> float:
            found = self._found[mutant["module"], nodeid]
            return (self._seconds_of(nodeid) + 0.01) / (1 + found)

        return sorted(mutant["tests"], key=cost)

    def _seconds_of(self, nodeid: str) -> float:
        return float(self._fastest.get(nodeid, self._tests[nodeid]["seconds"]))

    def _settle(
        self,
        session: pytest.Session,
        items: dict[str, pytest.Item],
        pending: list[dict[str, Any]],
        is_hung: bool,
    ) -> bool:
        """Report verdicts if the tests that failed pass on the original code."""
        # A test that passed on a later mutant did not fail because of a lasting effect.
        suspects = sorted(self._suspects)
        unsound = {test for test in suspects if not self._passes(session, items[test], 300)}
        self._suspects.clear()
        for found in pending:
            if unsound and found["verdict"] != "survived" and len(pending) > 1:
                self._write(again=found["key"], test=sorted(unsound)[0])
            else:
                self._write(**found)
        return not unsound

    def _passes(self, session: pytest.Session, item: pytest.Item, limit: float) -> bool:
        self._failed = False
        self._reason = ""
        above = _Above(item)
        session._setupstate.teardown_exact(above)  # type: ignore[arg-type]
        item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "timeout"]
        item.add_marker(pytest.mark.timeout(limit, method="signal"), append=False)
        if isinstance(item, pytest.Function):
            item._initrequest()
        item.ihook.pytest_runtest_protocol(item=item, nextitem=above)
        return not self._failed

    @contextmanager
    def _active(self, mutant: dict[str, Any]) -> Iterator[None]:
        """Replace the code of the changed function, in this process and in child processes."""
        source = Path(mutant["source_file"]).read_text()
        self._source.write_text(source)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(_MODULE, mutant["module"])
            patch.setenv(_RUN_FROM_IMPORT, str(self._source))
            path = sys.modules[mutant["module"]].__file__
            assert path is not None
            changed = {
                code.co_qualname: code
                for code in outer_functions(compile(source, path, "exec", dont_inherit=True))
            }
            functions = _live_functions()[path, mutant["function"]]
            originals = {function: function.__code__ for function in functions}
            _clear_caches()
            for function in originals:
                function.__code__ = changed[mutant["function"]]
            try:
                yield
            finally:
                for function, code in originals.items():
                    function.__code__ = code
                _clear_caches()


def shorten(item: pytest.Item) -> None:
    """Run properties on few and repeatable examples."""
    function = getattr(item, "obj", None)
    used = getattr(function, "_hypothesis_internal_use_settings", None)
    if isinstance(used, settings) and used.max_examples > _EXAMPLES:
        function._hypothesis_internal_use_settings = settings(used, max_examples=_EXAMPLES)  # type: ignore


class _Above:
    """The fixtures that are kept between two runs of tests of a module."""

    def __init__(self, item: pytest.Item) -> None:
        self._chain = item.listchain()[:-1]

    def listchain(self) -> list[Any]:
        return self._chain


@contextmanager
def _reached(paths: list[str]) -> Iterator[tuple[set[str], dict[str, set[int]]]]:
    """Record the called functions of the package, as `module:name`, and the lines of files."""
    called: set[CodeType] = set()
    names: set[str] = set()
    lines: dict[str, set[int]] = {path: set() for path in paths}

    def note(frame: FrameType, event: str, argument: Any) -> Any:
        called.add(frame.f_code)
        reached = lines.get(frame.f_code.co_filename)
        if reached is None:
            return None

        def note_line(frame: FrameType, event: str, argument: Any) -> Any:
            reached.add(frame.f_lineno)
            return note_line

        return note_line

    threading.settrace(note)
    sys.settrace(note)
    try:
        yield names, lines
    finally:
        sys.settrace(None)
        threading.settrace(None)
        for code in called:
            place = code.co_filename.rpartition(f"/{PACKAGE}/")
            if place[1]:
                module = f"{PACKAGE}.{place[2].removesuffix('.py').replace('/', '.')}"
                names.add(f"{module.removesuffix('.__init__')}:{code.co_qualname}")


def outer_functions(code: CodeType) -> Iterable[CodeType]:
    """Find the code objects of a module's functions and methods."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            # The body of a class begins with the name of its module.
            if "__module__" in constant.co_names and "__qualname__" in constant.co_names:
                yield from outer_functions(constant)
            elif "<" not in constant.co_qualname:
                yield constant


@functools.cache
def _live_functions() -> dict[tuple[str, str], list[FunctionType]]:
    """Find the functions inside of their decorators."""
    found: dict[tuple[str, str], list[FunctionType]] = defaultdict(list)
    for function in gc.get_objects():
        if isinstance(function, FunctionType) and f"/{PACKAGE}/" in function.__code__.co_filename:
            code = function.__code__
            found[code.co_filename, code.co_qualname].append(function)
    return found


@functools.cache
def _caches() -> list[functools._lru_cache_wrapper[Any]]:
    return [
        found
        for found in gc.get_objects()
        if isinstance(found, functools._lru_cache_wrapper)
        and str(getattr(found, "__module__", "")).startswith(f"{PACKAGE}.")
    ]


def _clear_caches() -> None:
    for cache in _caches():
        cache.cache_clear()
