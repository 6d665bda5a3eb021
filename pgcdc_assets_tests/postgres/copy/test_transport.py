"""The chunks of COPY: how many large rows wait, and how long the end of a reply takes."""

from __future__ import annotations

import time

import psycopg2
import pytest

from pgcdc_assets.postgres.copy import transport as copy_transport
from pgcdc_assets.postgres.copy.text import CopyChunk
from pgcdc_assets.postgres.copy.transport import copy_chunks
from pgcdc_assets_tests.support.database import Database

pytestmark = pytest.mark.postgres


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_one_large_row_waits_while_another_one_is_decoded(
    database: Database, is_encrypted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise memory would hold several rows of the greatest size beside the decoded one."""
    # The driver's own reader, which encrypted connections use.
    monkeypatch.setattr(copy_transport, "_is_encrypted", lambda _: is_encrypted)
    received: list[int] = []

    def counted(source: object, heads: object = None) -> CopyChunk:
        chunk = CopyChunk(source, heads)  # type: ignore[arg-type]
        received.append(len(chunk.source))
        return chunk

    monkeypatch.setattr(copy_transport, "CopyChunk", counted)
    query = "copy (select repeat('x', 1000000) from generate_series(1, 8)) to stdout"
    with database.connect(autocommit=False) as connection:
        assert isinstance(connection, psycopg2.extensions.connection)
        connection.cursor().execute("select 1")
        chunks = copy_chunks(database.settings(), connection, query, 100_000)
        first = next(chunks)
        time.sleep(0.5)
        assert len(received) == 2
        assert len(first.source) + sum(len(chunk.source) for chunk in chunks) == sum(received)
    assert sum(received) >= 8_000_000


def test_the_end_of_a_reply_is_not_awaited(database: Database) -> None:
    """The time limit of a receive call was 50 ms, which each COPY waited after its last byte."""
    query = "copy (select repeat('x', 100) from generate_series(1, 10000)) to stdout"
    taken = []
    with database.connect() as connection:
        for _ in range(20):
            began = time.monotonic()
            assert (
                sum(
                    len(chunk.source)
                    for chunk in copy_chunks(database.settings(), connection, query)
                )
                > 1_000_000
            )
            taken.append(time.monotonic() - began)
    assert min(taken) < 0.05
