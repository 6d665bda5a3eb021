"""The shop's live workload: transactions of every kind, over several concurrent connections.

The workload is a child process (`python -m pgcdc_assets.demo.workload`), so that it does not share
an interpreter with the pipeline. At SIGTERM, at SIGINT or after the end of its parent it completes
the open transactions, and prints the number of commits of each action.

Connections may collide (a deadlock, a row that another connection has just deleted). Such
transactions are rolled back and counted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing

import psycopg2

from pgcdc_assets.demo.actions import ACTIONS, Action, RolledBack


class Workload:
    """Runs actions over several connections until stopped.

    Args:
        conninfo: the shop's database.
        connection_count: the number of connections.
        transactions_per_second: total rate of all connections.
        seed: seed of the random choices of each connection. The order among connections is not
            repeatable.
    """

    def __init__(
        self,
        conninfo: str,
        *,
        connection_count: int = 4,
        transactions_per_second: float = 50,
        seed: int = 1,
    ) -> None:
        self._conninfo = conninfo
        self._connection_count = connection_count
        self._pause_seconds = connection_count / transactions_per_second
        self._seed = seed
        self._stopping = threading.Event()
        self._guard = threading.Lock()
        self.failure: Exception | None = None
        self.counts: Counter[str] = Counter()

    def run(self, seconds: float | None = None) -> Counter[str]:
        """Run for a time, or until `stop` is called; return the number of commits of each action.

        An error other than a collision ends the run, and is stored in `failure`.
        """
        workers = [
            threading.Thread(target=self._work, args=(number,), name=f"shop {number}", daemon=True)
            for number in range(self._connection_count)
        ]
        for worker in workers:
            worker.start()
        self._stopping.wait(seconds)
        self.stop()
        for worker in workers:
            worker.join()
        return self.counts

    def stop(self) -> None:
        """End the run after the open transactions."""
        self._stopping.set()

    def _work(self, number: int) -> None:
        chance = random.Random(f"{self._seed}/{number}")
        try:
            with closing(
                psycopg2.connect(self._conninfo, application_name=f"shop {number}")
            ) as connection:
                due = time.monotonic()
                while not self._stopping.is_set():
                    action = chance.choices(list(ACTIONS), list(ACTIONS.values()))[0]
                    self._count(_attempt(connection, action, chance))
                    # A late worker catches up with at most one second of work.
                    due = max(due + self._pause_seconds, time.monotonic() - 1)
                    self._stopping.wait(max(0.0, due - time.monotonic()))
        except psycopg2.Error as error:
            self.failure = error
            self.stop()

    def _count(self, name: str) -> None:
        with self._guard:
            self.counts[name] += 1


def _attempt(
    connection: psycopg2.extensions.connection, action: Action, chance: random.Random
) -> str:
    """Run one action as one transaction; return its name, `rolled_back` or `collided`."""
    with connection.cursor() as cursor:
        try:
            action(cursor, chance)
            connection.commit()
        except RolledBack:
            connection.rollback()
            return "rolled_back"
        except (psycopg2.errors.DeadlockDetected, psycopg2.IntegrityError):
            connection.rollback()
            return "collided"
    return action.__name__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; print the counts as JSON at the end."""
    parser = argparse.ArgumentParser(
        prog="python -m pgcdc_assets.demo.workload", description=__doc__
    )
    parser.add_argument("--conninfo", required=True, help="the shop's database")
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--rate", type=float, default=50, help="total transactions per second")
    parser.add_argument("--seconds", type=float, help="duration; default: until SIGTERM")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    workload = Workload(
        options.conninfo,
        connection_count=options.connections,
        transactions_per_second=options.rate,
        seed=options.seed,
    )
    # Block the signals and wait for them, because a handler must not set events of threads.
    stop_signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals)
    runner = threading.Thread(target=workload.run, args=(options.seconds,), name="workload")
    runner.start()
    parent = os.getppid()
    while runner.is_alive() and os.getppid() == parent:
        if signal.sigtimedwait(stop_signals, 0.2) is not None:
            break
    workload.stop()
    runner.join()
    print(json.dumps(dict(workload.counts)), flush=True)
    if workload.failure is not None:
        print(f"the workload ended: {workload.failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
