"""The spool of open transactions: memory, disk, other processes, and failures of the disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pgcdc_assets.capture.spool import TransactionSpool
from pgcdc_assets.errors import ConfigurationError, TransientError
from pgcdc_assets.protocol.open_transaction import SPOOLED


def rows(first: int, count: int = 100) -> pa.RecordBatch:
    numbers = np.arange(first, first + count)
    arrays = [
        pa.array(numbers),
        pa.array(np.full(count, ord("I"), np.uint8)),
        pa.array(np.zeros(count, np.int64)),
        pa.array(np.zeros(count, np.uint8)),
        pa.nulls(count, SPOOLED.field("old").type),
        pa.array([[str(n), None, "x" * 100] for n in numbers], SPOOLED.field("new").type),
        pa.nulls(count, SPOOLED.field("unchanged").type),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=SPOOLED)


SIZE = rows(0).get_total_buffer_size()


def test_interleaved_transactions_come_back_in_order_from_memory_and_disk(tmp_path: Path) -> None:
    """Transactions that are written several times, once, and never."""
    common = tmp_path / "spool"
    expected: dict[int, list[pa.RecordBatch]] = {}
    with TransactionSpool(common, memory_bytes=SIZE * 3) as spool:
        for step in range(20):
            for xid in (7, 8, 9)[: 1 + (step % 4 == 0) + (step == 19)]:
                expected.setdefault(xid, []).append(rows(step * 1000 + xid))
                spool.append(xid, expected[xid][-1])
        assert spool.written_bytes == spool.disk_bytes > 0
        for xid, batches in expected.items():
            assert list(spool.read(xid)) == batches
            # A read changes nothing.
            assert list(spool.read(xid)) == batches
        spool.drop(7)
        assert list(spool.read(7)) == []
        assert list(spool.read(8)) == expected[8]
        spool.append(7, rows(1))
        assert list(spool.read(7)) == [rows(1)]
        spool.drop(7)
        spool.drop(123)
        spool.clear()
        assert spool.disk_bytes == 0
        assert [path.name for path in common.glob("*/*.arrows")] == []
    assert [path.name for path in common.iterdir()] == [".lock"]


def test_the_largest_transaction_is_written_first(tmp_path: Path) -> None:
    with TransactionSpool(tmp_path / "spool", memory_bytes=SIZE * 4) as spool:
        for xid in (7, 7, 7, 8, 9):
            spool.append(xid, rows(xid))
        assert [file.name for file in tmp_path.glob("**/*.arrows")] == ["7.arrows"]


def test_rows_on_disk_are_compressed(tmp_path: Path) -> None:
    """The rows repeat a text of 100 bytes."""
    written = rows(0, 10_000)
    with TransactionSpool(tmp_path / "spool", memory_bytes=1) as spool:
        spool.append(7, written)
        (file,) = tmp_path.glob("**/7.arrows")
        assert 0 < file.stat().st_size == spool.disk_bytes < written.nbytes / 4
        assert list(spool.read(7)) == [written]


def test_small_transactions_never_touch_the_disk(tmp_path: Path) -> None:
    with TransactionSpool(tmp_path / "spool") as spool:
        spool.append(7, rows(0))
        assert spool.written_bytes == 0
    assert list(tmp_path.iterdir()) == []


HOLD = """
import sys, time
from pathlib import Path
from pgcdc_assets.capture.spool import TransactionSpool
from pgcdc_assets_tests.capture.test_spool import rows
spool = TransactionSpool(Path(sys.argv[1]), memory_bytes=1)
spool.append(7, rows(0))
print("written", flush=True)
time.sleep(60)
"""


@pytest.mark.sampled
def test_the_next_process_removes_the_folder_of_a_killed_one_and_no_other(tmp_path: Path) -> None:
    common = tmp_path / "spool"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", HOLD, str(common)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "written\n"
        # A process that was killed between the creation of its folder and its lock.
        (common / "1-1-unlocked").mkdir()
        killed, running = processes
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert len(list(common.glob("*/7.arrows"))) == 2
        with TransactionSpool(common, memory_bytes=1) as spool:
            (folder,) = common.glob("[0-9]*")
            assert folder.name.startswith(f"{running.pid}-")
            spool.append(8, rows(0))
            owners = {path.name.split("-")[0] for path in common.glob("[0-9]*")}
            assert owners == {str(running.pid), str(os.getpid())}
            assert len(list(common.glob("*/7.arrows"))) == 1
    finally:
        for process in processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def test_a_folder_that_vanishes_does_not_keep_other_leftovers(tmp_path: Path) -> None:
    """Its process ends at this moment. The lock of such a folder can no longer be created."""
    common = tmp_path / "spool"
    common.mkdir(mode=0o700)
    for number in range(20):
        vanishing = common / f"1-{number}-vanishing"
        vanishing.mkdir()
        (vanishing / ".lock").symlink_to(tmp_path / "missing" / "lock")
        (common / f"2-{number}-left").mkdir()
    TransactionSpool(common).close()
    assert list(common.glob("*-left")) == []


@pytest.mark.parametrize("case", ["link", "open", "file", "replaceable"])
def test_a_folder_that_another_user_may_have_prepared_is_refused(tmp_path: Path, case: str) -> None:
    common = tmp_path / "shared" / "spool"
    common.parent.mkdir()
    if case == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        common.symlink_to(tmp_path / "elsewhere")
    elif case == "open":
        common.mkdir(mode=0o700)
        common.chmod(0o755)
    elif case == "file":
        common.write_text("")
    else:
        common.parent.chmod(0o777)
    with (
        TransactionSpool(common, memory_bytes=1) as spool,
        pytest.raises(ConfigurationError, match="TMPDIR"),
    ):
        spool.append(7, rows(0))
    assert not list(tmp_path.glob("**/*.arrows"))


def test_a_link_among_the_folders_is_not_followed(tmp_path: Path) -> None:
    common = tmp_path / "spool"
    common.mkdir(mode=0o700)
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "kept").write_text("kept")
    (common / "1-1-link").symlink_to(victim)
    with TransactionSpool(common, memory_bytes=1) as spool:
        spool.append(7, rows(0))
    assert (victim / "kept").read_text() == "kept"


FULL = """
import resource, sys
from pathlib import Path
from pgcdc_assets.capture.spool import TransactionSpool
from pgcdc_assets.errors import TransientError
from pgcdc_assets_tests.capture.test_spool import rows
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
with TransactionSpool(Path(sys.argv[1]), memory_bytes=1) as spool:
    try:
        for step in range(100):
            spool.append(7, rows(step))
    except TransientError as error:
        print(error)
"""


def test_a_full_disk_is_a_transient_error_with_the_remedy(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "spool")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "cannot be written: File too large. Free space" in done.stdout
    assert "No change is lost; run it again." in done.stdout
    assert [path.name for path in (tmp_path / "spool").iterdir()] == [".lock"]


NEARLY_FULL = """
import resource, sys
from pathlib import Path
from pgcdc_assets.capture.spool import TransactionSpool
from pgcdc_assets.errors import TransientError
from pgcdc_assets_tests.capture.test_spool import rows
with TransactionSpool(Path(sys.argv[1]), memory_bytes=1) as spool:
    spool.append(7, rows(0))
    size = spool.disk_bytes
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (*range(size - 64, size), *range(1, size - 64, 97)):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
        try:
            spool.append(8, rows(0))
            print(limit, "of", size)
        except TransientError:
            pass
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        spool.drop(8)
"""


def test_a_disk_that_has_space_for_a_part_of_a_write_is_full(tmp_path: Path) -> None:
    """The system writes the part. Nothing tells of the rest unless the length is compared."""
    done = subprocess.run(
        [sys.executable, "-c", NEARLY_FULL, str(tmp_path / "spool")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == ""


def test_a_damaged_file_is_a_transient_error(tmp_path: Path) -> None:
    with TransactionSpool(tmp_path / "spool", memory_bytes=1) as spool:
        spool.append(7, rows(0))
        (file,) = tmp_path.glob("**/*.arrows")
        file.write_bytes(file.read_bytes()[:200])
        with pytest.raises(TransientError, match=r"cannot be read: (OSError|ArrowInvalid)\. Check"):
            list(spool.read(7))
        file.unlink()
        with pytest.raises(TransientError, match="No such file"):
            list(spool.read(7))


def test_a_machine_without_a_writable_folder_has_a_spool_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing() -> str:
        raise FileNotFoundError

    monkeypatch.setattr(tempfile, "gettempdir", missing)
    with TransactionSpool() as spool:
        assert list(spool.read(7)) == []
