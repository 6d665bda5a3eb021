"""A session that streams open transactions lands what a session without streaming lands."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pgcdc_assets.capture.source_stream import SourceStream
from pgcdc_assets.errors import TransientError
from pgcdc_assets.protocol.frames import MessageBatch
from pgcdc_assets_tests.support.captures import Capturing

pytestmark = pytest.mark.postgres


def test_messages_that_end_before_the_window_land_nothing(
    capturing: Capturing, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = capturing.begin_with_one_insert()
    arriving = SourceStream.messages

    def first_batch(source: SourceStream) -> Iterator[MessageBatch]:
        batch = next(iter(arriving(source)))
        yield batch._replace(starts=batch.starts[:1], ends=batch.ends[:1])

    with monkeypatch.context() as patched:
        patched.setattr(SourceStream, "messages", first_batch)
        with pytest.raises(TransientError, match="before the end of window"):
            capturing.capture(window)

    assert capturing.rows() == []
    assert capturing.zone.changes.windows(1) == []
    assert capturing.confirmed() < window.end
    assert capturing.capture(window).row_count == 1
