"""Changes that were replicated into the source: their origin, and commit times that are no times.

The session that writes such a change gives the commit time of its origin, or none. Postgres accepts
any time, and sends 2000-01-01 without one.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from psycopg2.extensions import cursor as Cursor

from pgcdc_assets.capture.window import CaptureLimits
from pgcdc_assets.postgres.stream.plugin_options import PluginOptions, Streaming
from pgcdc_assets.postgres.stream.request import StreamSettings
from pgcdc_assets_tests.support.captures import Capturing
from pgcdc_assets_tests.support.prepared import two_phase_limits

pytestmark = [pytest.mark.postgres, pytest.mark.every_pg]

_NO_TIME = dt.datetime(2000, 1, 1, tzinfo=dt.UTC)
# The time that the origin gives, and the commit time.
_TIMES = {
    "": _NO_TIME,
    "infinity": _NO_TIME,
    "-infinity": _NO_TIME,
    "0044-03-15 00:00:00+00 BC": _NO_TIME,
    "20000-01-01 00:00:00+00": _NO_TIME,
    "2024-02-29 12:00:00.000001+00": dt.datetime(2024, 2, 29, 12, 0, 0, 1, tzinfo=dt.UTC),
}
_ROWS = 200


@dataclass(frozen=True)
class Origin:
    """A session that writes changes of a replication origin."""

    name: str
    cursor: Cursor

    def commit(self, number: int, time: str, end: str = "commit") -> None:
        """Insert rows in a transaction of the origin."""
        self.at(time)
        self.cursor.execute(
            f"begin; insert into t select {number * 1000} + n, repeat(md5(n::text), 30) "
            f"from generate_series(1, {_ROWS}) n; {end}"
        )

    def at(self, time: str) -> None:
        """Let the next commit have a time of the origin."""
        call = f"xact_setup('0/10', '{time}')" if time else "xact_reset()"
        self.cursor.execute(f"select pg_replication_origin_{call}")


@pytest.fixture
def origin(capturing: Capturing) -> Iterator[Origin]:
    """Begin with a table, and open a session of a replication origin."""
    database, name = capturing.database, f"o_{capturing.slot}"
    capturing.begin("create table t (id int primary key, note text)")
    database.execute(f"alter database {database.name} set logical_decoding_work_mem = '64kB'")
    database.execute("select pg_replication_origin_create(%s)", (name,))
    try:
        with database.connect() as connection, connection.cursor() as cursor:
            cursor.execute("select pg_replication_origin_session_setup(%s)", (name,))
            yield Origin(name, cursor)
            cursor.execute("select pg_replication_origin_session_reset()")
    finally:
        database.execute("select pg_replication_origin_drop(%s)", (name,))


def _check(capturing: Capturing, origin: Origin) -> None:
    """Check that each transaction is landed with its origin and its commit time."""
    rows = capturing.rows()
    assert [int(row["new"][0]) for row in rows[::_ROWS]] == [
        number * 1000 + 1 for number in range(len(_TIMES))
    ]
    assert len(rows) == _ROWS * len(_TIMES)
    assert [row["commit_ts"] for row in rows[::_ROWS]] == list(_TIMES.values())
    assert {row["origin"] for row in rows} == {origin.name}


@pytest.mark.parametrize("streaming", [Streaming.OFF, Streaming.ON])
def test_any_commit_time_of_an_origin_is_captured(
    capturing: Capturing, origin: Origin, streaming: Streaming
) -> None:
    for number, time in enumerate(_TIMES):
        origin.commit(number, time)
    plugin = PluginOptions(streaming)
    capturing.capture(limits=CaptureLimits(stream=StreamSettings(plugin=plugin)))
    _check(capturing, origin)


@pytest.mark.parametrize("streaming", [Streaming.OFF, Streaming.ON])
def test_a_prepared_transaction_of_an_origin_may_have_any_times(
    capturing: Capturing, origin: Origin, streaming: Streaming
) -> None:
    """The transactions are prepared in one window, and end in another one."""
    if capturing.database.server.version < 15:
        pytest.skip("two_phase requires Postgres 15")
    limits = two_phase_limits(streaming)
    capturing.capture(limits=limits)
    for number, time in enumerate([*_TIMES, "infinity"]):
        origin.commit(number, time, f"prepare transaction '{origin.name}_{number}'")
    capturing.capture(limits=limits)
    assert capturing.rows() == []
    for number, time in enumerate(_TIMES):
        origin.at(time)
        origin.cursor.execute(f"commit prepared '{origin.name}_{number}'")
    origin.cursor.execute(f"rollback prepared '{origin.name}_{len(_TIMES)}'")
    capturing.capture(limits=limits)
    _check(capturing, origin)
