"""Captures that are killed at random land each change once, in each mode of the stream.

Transactions have subtransactions, exceed logical_decoding_work_mem, are prepared, fail and are
rolled back. `support/convergence/kills.py` runs a thousand kills.
"""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from pgcdc_assets.postgres.stream.plugin_options import PluginOptions, Streaming
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.support.convergence.kills import KilledCaptures
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.standby import Source
from pgcdc_assets_tests.support.tls_server import Certificates, tls_fronts

pytestmark = [pytest.mark.postgres, pytest.mark.slow, pytest.mark.timeout(300)]

KILLS = 6


def _check(captures: KilledCaptures) -> None:
    captures.begin()
    share = 0.2 if captures.plugin.two_phase else 0.0
    captures.run(KILLS, 3, share, seconds=90)
    landed, lost, doubled = captures.count()
    print(f"{captures.kills.total()} kills, {landed} changes, {dict(captures.outcomes)}")
    assert (lost, doubled) == (0, 0)
    assert landed > 100
    assert captures.kills.total() >= KILLS / 2


@pytest.mark.every_pg
@pytest.mark.parametrize("streaming", list(Streaming))
@pytest.mark.parametrize("two_phase", [False, True])
def test_each_mode_on_each_version(
    database: Database, zone: RawZone, seed: int, streaming: Streaming, two_phase: bool
) -> None:
    version = int(database.value("show server_version_num")) // 10000
    if (version < 15 and two_phase) or (version < 16 and streaming is Streaming.PARALLEL):
        pytest.skip("the version does not have this mode")
    plugin = PluginOptions(streaming, two_phase)
    _check(KilledCaptures(database, database, zone, plugin, seed))


@pytest.mark.parametrize("streaming", [Streaming.OFF, Streaming.ON])
def test_over_tls(
    database: Database,
    zone: RawZone,
    seed: int,
    streaming: Streaming,
    certificates: Certificates,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pgcdc_assets.postgres.stream import connection, tls_transport

    monkeypatch.setattr(connection, "SocketWire", tls_transport.start_tls_wire)
    with ExitStack() as stack:
        stack.enter_context(tls_fronts(certificates))
        plugin = PluginOptions(streaming, two_phase=True)
        _check(KilledCaptures(database, database, zone, plugin, seed))


@pytest.mark.parametrize("streaming", [Streaming.OFF, Streaming.ON])
def test_from_a_standby(source: Source, zone: RawZone, seed: int, streaming: Streaming) -> None:
    """The primary prepares transactions, and the standby's slot sends them."""
    if int(source.primary.value("show server_version_num")) < 160000:
        pytest.skip("a standby decodes from Postgres 16 on")
    plugin = PluginOptions(streaming, two_phase=True)
    _check(KilledCaptures(source.primary, source.standby, zone, plugin, seed))
