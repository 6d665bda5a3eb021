"""Batches without a change between two transactions."""

from __future__ import annotations

import pytest

from pgcdc_assets.protocol.empty_batches import is_empty, is_quiet
from pgcdc_assets.protocol.frames import MessageBatch
from pgcdc_assets_tests.support.protocol.encoding import (
    begin,
    commit,
    insert,
    keepalive,
    logical_message,
    xlog_data,
)

EMPTY = [xlog_data(begin(10, 1)), xlog_data(commit(10))]
HEARTBEAT = xlog_data(logical_message("pgcdc", b"content"))
MESSAGE = xlog_data(logical_message("pgcdc2", b""))


@pytest.mark.parametrize(
    ("messages", "empty", "quiet"),
    [
        ([keepalive(7)], True, True),
        ([keepalive(7), *EMPTY, keepalive(11), *EMPTY], True, True),
        ([EMPTY[0], keepalive(7), EMPTY[1]], True, True),
        ([EMPTY[0]], False, False),
        ([EMPTY[1]], False, False),
        ([*EMPTY, EMPTY[0]], False, False),
        ([EMPTY[0], HEARTBEAT, EMPTY[1]], False, True),
        ([EMPTY[0], HEARTBEAT, MESSAGE, EMPTY[1]], False, False),
        ([EMPTY[0], xlog_data(insert(1, [b"1"])), EMPTY[1]], False, False),
        ([xlog_data(b"S" + bytes(5)), xlog_data(b"E")], False, False),
        ([keepalive(7), b"x"], False, False),
        ([*EMPTY, EMPTY[0], xlog_data(insert(1, [b"1"]))], False, False),
    ],
)
def test_only_keepalives_empty_transactions_and_heartbeats_are_quiet(
    messages: list[bytes], empty: bool, quiet: bool
) -> None:
    batch = MessageBatch.of(messages)
    assert (is_empty(batch), is_quiet(batch)) == (empty, quiet)
