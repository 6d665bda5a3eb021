"""Captures that are killed at random land each change once, in each mode of the stream.

Transactions have subtransactions, exceed logical_decoding_work_mem, are prepared, fail and are
rolled back. `support/convergence/kills.py` runs a thousand kills.
"""

from __future__ import annotations

import pytest

from pgcdc_assets.postgres.stream.plugin_options import PluginOptions, Streaming
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.support.certificates import Certificates
from pgcdc_assets_tests.support.convergence.kills import Outcome, run_in_process
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.encoded import encoded_database
from pgcdc_assets_tests.support.standby import Source

pytestmark = [pytest.mark.postgres, pytest.mark.slow, pytest.mark.timeout(300)]

KILLS = 6


def _check(outcome: Outcome) -> None:
    print(outcome)
    assert (outcome.lost, outcome.doubled) == (0, 0)
    assert outcome.landed > 100
    assert sum(outcome.kills.values()) >= KILLS / 2


def _version(database: Database) -> int:
    return int(database.value("show server_version_num")) // 10000


@pytest.mark.every_pg
@pytest.mark.parametrize(
    ("streaming", "two_phase"),
    [
        (Streaming.ON, True),
        (Streaming.OFF, True),
        pytest.param(Streaming.PARALLEL, True, marks=pytest.mark.soak),
        pytest.param(Streaming.ON, False, marks=pytest.mark.soak),
        pytest.param(Streaming.OFF, False, marks=pytest.mark.soak),
        pytest.param(Streaming.PARALLEL, False, marks=pytest.mark.soak),
    ],
)
def test_each_mode_on_each_version(
    database: Database, zone: RawZone, seed: int, streaming: Streaming, two_phase: bool
) -> None:
    version = _version(database)
    if (version < 15 and two_phase) or (version < 16 and streaming is Streaming.PARALLEL):
        pytest.skip("the version does not have this mode")
    plugin = PluginOptions(streaming, two_phase)
    _check(run_in_process(database, database, zone, plugin, seed, KILLS))


@pytest.mark.sampled
@pytest.mark.every_pg(is_short=False)
@pytest.mark.parametrize(
    "streaming", [pytest.param(Streaming.OFF, marks=pytest.mark.soak), Streaming.ON]
)
def test_over_tls(
    database: Database,
    zone: RawZone,
    seed: int,
    streaming: Streaming,
    certificates: Certificates,
) -> None:
    plugin = PluginOptions(streaming, two_phase=_version(database) >= 15)
    _check(run_in_process(database, database, zone, plugin, seed, KILLS, certificates))


@pytest.mark.sampled
@pytest.mark.parametrize("encoding", ["EUC_JP", "WIN1252"])
def test_a_database_of_another_encoding(
    database: Database, zone: RawZone, seed: int, encoding: str
) -> None:
    plugin = PluginOptions(Streaming.ON, two_phase=_version(database) >= 15)
    with encoded_database(database, encoding) as encoded:
        _check(run_in_process(encoded, encoded, zone, plugin, seed, KILLS))


@pytest.mark.every_pg(since=16)
@pytest.mark.parametrize(
    ("streaming", "is_encrypted"),
    [
        (Streaming.OFF, False),
        (Streaming.ON, True),
        pytest.param(Streaming.ON, False, marks=pytest.mark.soak),
        pytest.param(Streaming.PARALLEL, False, marks=pytest.mark.soak),
    ],
)
def test_from_a_standby(
    source: Source,
    zone: RawZone,
    seed: int,
    streaming: Streaming,
    is_encrypted: bool,
    certificates: Certificates,
) -> None:
    """The primary prepares transactions, and the standby's slot sends them, also over TLS."""
    if _version(source.primary) < 16:
        pytest.skip("a standby decodes from Postgres 16 on")
    plugin = PluginOptions(streaming, two_phase=True)
    # Otherwise the primary removes catalog rows that the slot needs, which invalidates the slot.
    with source.standby_setting("hot_standby_feedback", "on"):
        front = certificates if is_encrypted else None
        _check(run_in_process(source.primary, source.standby, zone, plugin, seed, KILLS, front))
