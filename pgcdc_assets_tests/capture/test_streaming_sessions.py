"""A session that streams open transactions lands what a session without streaming lands."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pgcdc_assets import failpoints
from pgcdc_assets.capture.limits import CaptureLimits
from pgcdc_assets.capture.source_stream import SourceStream
from pgcdc_assets.capture.spool import TransactionSpool
from pgcdc_assets.errors import TransientError
from pgcdc_assets.lsn import LsnWindow
from pgcdc_assets.postgres.stream.plugin_options import PluginOptions, Streaming
from pgcdc_assets.postgres.stream.request import StreamSettings
from pgcdc_assets.postgres.stream.transport import WireSettings
from pgcdc_assets.protocol.frames import MessageBatch
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.support import capture_failpoints
from pgcdc_assets_tests.support.captures import Capturing

if TYPE_CHECKING:
    import pyarrow as pa

pytestmark = pytest.mark.postgres

BATCH_BYTES = 100_000
STREAMING = CaptureLimits(
    stream=StreamSettings(
        wire=WireSettings(batch_bytes=BATCH_BYTES), plugin=PluginOptions(Streaming.ON)
    )
)
FILL = "insert into t select i, repeat(md5(i::text), 20) from generate_series(%s, %s) i"


def begin(capturing: Capturing, folder: Path) -> Capturing:
    """Begin a capture whose server sends small blocks, and return a copy of the capture."""
    capturing.begin("create table t (id int, v text)", "create table s (id int)")
    database = capturing.database
    database.execute(f"alter database {database.name} set logical_decoding_work_mem = '64kB'")
    other = f"{capturing.slot}_whole"
    database.value("select pg_copy_logical_replication_slot(%s, %s)", (capturing.slot, other))
    zone = RawZone(Lake(str(folder / "whole")), "test")
    epoch = capturing.zone.epochs.latest()
    assert epoch is not None
    zone.epochs.append(replace(epoch, slot=other))
    return replace(capturing, zone=zone, slot=other)


def write_windows(capturing: Capturing, count: int) -> list[LsnWindow]:
    """Write `count` windows beside a transaction that commits in the last one but one."""
    windows, start = [], capturing.captured_through()
    with capturing.database.connect(autocommit=False) as spanning:
        cursor = spanning.cursor()
        for number in range(count):
            cursor.execute(FILL, (number * 1000, number * 1000 + 499))
            with capturing.database.connect(autocommit=False) as inside, inside.cursor() as own:
                own.execute(FILL, (100_000 + number * 1000, 100_000 + number * 1000 + 399))
                own.execute("savepoint undone")
                own.execute(FILL, (200_000, 200_199))
                own.execute("rollback to undone")
                own.execute("insert into s values (%s)", (number,))
                inside.commit()
            if number == count - 2:
                spanning.commit()
            windows.append(LsnWindow.of(1, start, capturing.flush_lsn()))
            start = windows[-1].end
    return windows


def check_equal(capturing: Capturing, whole: Capturing, windows: list[LsnWindow]) -> None:
    """Capture the copy without streaming, and check that the raw zones are equal."""
    for window in windows:
        whole.capture(window)
    rows = capturing.rows()
    assert rows == whole.rows()
    assert len(rows) == len(windows) * 401 + (len(windows) - 1) * 500
    assert capturing.zone.changes.windows(1) == whole.zone.changes.windows(1)
    assert capturing.zone.relations.versions(1) == whole.zone.relations.versions(1)
    assert capturing.confirmed() == whole.confirmed() == windows[-1].end


@pytest.mark.sampled
def test_after_a_kill_at_each_step_a_streaming_session_lands_each_change_once(
    capturing: Capturing, tmp_path: Path
) -> None:
    """A2, A6: an open transaction has sent blocks before each kill."""
    whole = begin(capturing, tmp_path)
    windows = write_windows(capturing, len(capture_failpoints.WINDOW))

    for window, failpoint in zip(windows, capture_failpoints.WINDOW, strict=True):
        killed = capturing.capture_process(
            window, failpoint=failpoint, batch_bytes=BATCH_BYTES, streaming="on"
        )
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        report = capturing.capture(window, STREAMING)
        is_landed = failpoint in (failpoints.AFTER_DELTA_COMMIT, failpoints.AFTER_STATUS_PACKET)
        assert report.already_captured == is_landed

    check_equal(capturing, whole, windows)


def test_one_streaming_session_lands_the_windows_of_transactions_that_span_them(
    capturing: Capturing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = begin(capturing, tmp_path)
    windows = write_windows(capturing, 4)
    spooled = set()
    append = TransactionSpool.append

    def watched(spool: TransactionSpool, xid: int, rows: pa.RecordBatch) -> None:
        spooled.add(xid)
        append(spool, xid, rows)

    monkeypatch.setattr(TransactionSpool, "append", watched)
    with capturing.session(STREAMING) as session:
        for window in windows:
            session.land(window)
        assert session.finish()

    assert len(spooled) > 1
    check_equal(capturing, whole, windows)


def test_a_session_leaves_no_rows_of_an_open_transaction_on_the_disk(
    capturing: Capturing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(capturing, tmp_path)
    common = tmp_path / "spool"
    spool = partial(TransactionSpool, common, memory_bytes=1)
    monkeypatch.setattr("pgcdc_assets.capture.source_stream.TransactionSpool", spool)
    with capturing.database.connect(autocommit=False) as connection:
        connection.cursor().execute(FILL, (0, 499))
        with capturing.session(STREAMING) as session:
            session.land(capturing.window())
            assert len(list(common.glob("*/*.arrows"))) == 1
    assert [path.name for path in common.iterdir()] == [".lock"]


def test_messages_that_end_before_the_window_land_nothing(
    capturing: Capturing, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = capturing.begin_with_one_insert()
    arriving = SourceStream.messages

    def first_message(source: SourceStream) -> Iterator[MessageBatch]:
        batch = next(iter(arriving(source)))
        yield batch._replace(starts=batch.starts[:1], ends=batch.ends[:1])

    with monkeypatch.context() as patched:
        patched.setattr(SourceStream, "messages", first_message)
        with pytest.raises(TransientError, match="before the end of window"):
            capturing.capture(window)

    assert capturing.rows() == []
    assert capturing.zone.changes.windows(1) == []
    assert capturing.confirmed() < window.end
    assert capturing.capture(window).row_count == 1


def test_a_message_of_a_rolled_back_savepoint_is_not_landed(
    capturing: Capturing, tmp_path: Path
) -> None:
    """pgoutput sends each message of a block with the id of the top-level transaction."""
    whole = begin(capturing, tmp_path)
    start, windows = capturing.captured_through(), []
    for number in range(3):
        with capturing.database.connect(autocommit=False) as connection:
            cursor = connection.cursor()
            cursor.execute(FILL, (0, 499))
            cursor.execute("select pg_logical_emit_message(true, 'kept', '')")
            if number != 1:
                cursor.execute("savepoint undone")
                cursor.execute("select pg_logical_emit_message(true, 'undone', '')")
                cursor.execute(FILL, (1000, 1499))
                cursor.execute("rollback to undone")
            cursor.execute(FILL, (2000, 2000 + 400))
            connection.commit()
        windows.append(LsnWindow.of(1, start, capturing.flush_lsn()))
        start = windows[-1].end

    with capturing.session(STREAMING) as session:
        for window in windows:
            session.land(window)
        assert session.finish()

    for window in windows:
        whole.capture(window)
    assert capturing.rows() == whole.rows()
    assert [row["op"] for row in capturing.rows()].count("M") == 3
