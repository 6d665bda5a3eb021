"""Connections that act at random in separate threads, until the end of a block.

Each connection has a random generator, seeded by the run's seed and the connection's name. A run is
therefore repeatable except for the interleaving of connections.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from threading import Event, Lock, Thread
from typing import NamedTuple

import psycopg2
from psycopg2.extensions import cursor as Cursor


class Actor(NamedTuple):
    """The repeated action of a connection.

    Attributes:
        act: function that acts once, and returns the name of the outcome to count.
        pause_seconds: maximum pause after an action.
    """

    act: Callable[[Cursor, random.Random], str]
    pause_seconds: float


class Writers:
    """Connections that act until the end of the block.

    Args:
        actors: the actors by the name of the connection.
    """

    def __init__(self, conninfo: str, seed: int, actors: Mapping[str, Actor]) -> None:
        self.conninfo = conninfo
        self._seed = seed
        self._stop = Event()
        self._is_running = Event()
        self._is_running.set()
        self._guard = Lock()
        self._errors: list[BaseException] = []
        self.outcomes: Counter[str] = Counter()
        self._threads = [Thread(target=self._work, args=named) for named in actors.items()]

    def start(self) -> None:
        """Start the connections."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the connections, and raise the first error of a connection."""
        self._stop.set()
        self._is_running.set()
        for thread in self._threads:
            thread.join(60)
        if self._errors:
            raise self._errors[0]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause new transactions inside the block."""
        self._is_running.clear()
        try:
            yield
        finally:
            self._is_running.set()

    def _work(self, name: str, actor: Actor) -> None:
        decide = random.Random(f"{self._seed}-{name}")
        try:
            with closing(psycopg2.connect(self.conninfo, application_name=name)) as connection:
                with connection.cursor() as cursor:
                    cursor.execute("set lock_timeout = '300ms'; set deadlock_timeout = '50ms'")
                    connection.commit()
                    while not self._stop.is_set():
                        outcome = actor.act(cursor, decide)
                        with self._guard:
                            self.outcomes[outcome] += 1
                        # The pause makes the time of a kill independent of the volume of changes.
                        self._stop.wait(decide.random() * actor.pause_seconds)
                        self._is_running.wait()
        except BaseException as error:
            self._errors.append(error)
