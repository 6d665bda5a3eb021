"""The distribution of tests to several processes: `-n 5 --dist loadscope`.

A process runs one group of tests after the other. A group is a module, so that a module's fixtures
are set up once. The tests on a Spark Connect session are one group, so that one process starts the
server. Two more processes run the tests on an embedded session. The other processes run tests
without Spark, and end when no such tests remain, because each JVM costs as much as thirty merges.
Tests without Spark often wait for Postgres or for a time limit, so five processes are needed to
keep two cores busy.

Long groups come first, because a long group at the end would leave the other processes idle. The
duration is estimated from the fixtures of the tests, because measured durations become outdated.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import pytest

from pgcdc_assets_tests.support.spark import CONNECT, EMBEDDED

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling
    from xdist.workermanage import WorkerController

# Estimated seconds of a test, by its most expensive fixture.
_SECONDS = {
    "spark_kind": 6.0,
    "own_server": 5.0,
    "orchestrated": 3.0,
    "capturing": 1.5,
    "database": 0.7,
}
_SECONDS_OF_A_SLOW_TEST = 15.0
_SECONDS_OF_ANOTHER = 0.02

# Processes with an embedded session: as many as cores.
_EMBEDDED_PROCESSES = 2

_ON_CONNECT = re.compile(rf"[\[-]{CONNECT}[\]-]")
_ON_EMBEDDED = re.compile(rf"[\[-]{EMBEDDED}[\]-]")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort long groups first in an xdist worker."""
    if not hasattr(config, "workerinput"):
        return
    seconds: defaultdict[str, float] = defaultdict(float)
    for item in items:
        seconds[group_of(item.nodeid)] += _estimate(item)
    items.sort(key=lambda item: (-seconds[group_of(item.nodeid)], group_of(item.nodeid)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    """Return the scheduler that distributes tests by group."""
    from xdist.scheduler import LoadScopeScheduling

    # pytest-xdist has no annotations.
    class ByGroup(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

        def _assign_work_unit(self, node: WorkerController) -> None:
            taken = {other: kinds_of(work) for other, work in self.assigned_work.items()}
            own = taken.pop(node, set())
            chosen = choose_group(self.workqueue, own, list(taken.values()))
            if chosen is None:
                node.shutdown()
                return
            self.workqueue.move_to_end(chosen, last=False)
            super()._assign_work_unit(node)

    return ByGroup(config, log) if config.getoption("dist") == "loadscope" else None


def group_of(nodeid: str) -> str:
    """Return the group of a test."""
    return CONNECT if _ON_CONNECT.search(nodeid) else nodeid.partition("::")[0]


def kinds_of(groups: Mapping[str, Iterable[str]]) -> set[str]:
    """Return the kinds of Spark session that groups of tests need."""
    tests = [test for group in groups.values() for test in group]
    patterns = {CONNECT: _ON_CONNECT, EMBEDDED: _ON_EMBEDDED}
    return {kind for kind, pattern in patterns.items() if any(map(pattern.search, tests))}


def choose_group(
    queue: Mapping[str, Iterable[str]], own: Set[str], others: Sequence[Set[str]]
) -> str | None:
    """Choose the next group of tests for a process; None if the process must end.

    Args:
        queue: the tests of each waiting group.
        own: the kinds of Spark session that the process has used.
        others: the kinds of Spark session that each other process has used.
    """
    if CONNECT in queue:
        return CONNECT
    is_free = sum(EMBEDDED in kinds for kinds in others) < _EMBEDDED_PROCESSES
    takes_embedded = EMBEDDED in own or (not own and is_free)
    on_embedded = {group: EMBEDDED in kinds_of({group: tests}) for group, tests in queue.items()}
    first = next((group for group, is_on in on_embedded.items() if is_on is takes_embedded), None)
    if first is None and (takes_embedded or is_free):
        return next(iter(queue))
    return first


def _estimate(item: pytest.Item) -> float:
    if item.get_closest_marker("slow") is not None:
        return _SECONDS_OF_A_SLOW_TEST
    asked = set(getattr(item, "fixturenames", ()))
    return next((s for name, s in _SECONDS.items() if name in asked), _SECONDS_OF_ANOTHER)
