"""A malformed message: its place in the error, and its batch in a file if a setting allows it."""

from __future__ import annotations

import stat
import struct
from pathlib import Path

import pytest

from pgcdc_assets.capture.limits import CaptureLimits
from pgcdc_assets.errors import ProtocolError
from pgcdc_assets_tests.support.captures import Capturing
from pgcdc_assets_tests.support.proxy import TcpProxy

pytestmark = pytest.mark.postgres

SECRET = b"a value of a row"


def _read(path: Path) -> list[bytes]:
    """Return the messages of a kept batch."""
    data, messages = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("!Q", data[:8])
        messages.append(data[8 : 8 + length])
        data = data[8 + length :]
    return messages


def _insert_secret(capturing: Capturing) -> bytes:
    """Publish a table with a row; return the table's OID as in a message."""
    capturing.begin("create table t (id int, v text)")
    capturing.database.execute("insert into t values (1, %s)", (SECRET.decode(),))
    relation_id: int = capturing.database.value("select 't'::regclass::oid")
    return relation_id.to_bytes(4, "big")


@pytest.mark.parametrize("is_kept", [False, True])
def test_the_batch_of_a_malformed_message_is_kept_only_on_request(
    capturing: Capturing, proxy: TcpProxy, tmp_path: Path, is_kept: bool
) -> None:
    relation_id, folder = _insert_secret(capturing), tmp_path / "kept"
    through = capturing.through(proxy.conninfo(capturing.conninfo))
    proxy.damage(b"I" + relation_id, b"I\0\0\0\x01")
    window, before = through.window(), capturing.confirmed()
    limits = CaptureLimits(malformed_folder=str(folder) if is_kept else None)
    with pytest.raises(ProtocolError) as caught:
        through.capture(window, limits)
    error = str(caught.value)
    for part in ("relation 1", window.key, "bytes into its batch", "committed at"):
        assert part in error
    assert SECRET.decode() not in error
    assert capturing.confirmed() == before
    assert capturing.rows() == []
    if not is_kept:
        assert "stream.malformed_folder" in error
        assert not folder.exists()
        return
    path = folder / f"{capturing.slot}-{window.key}.messages"
    assert str(path) in error
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    [row] = [message for message in _read(path) if SECRET in message]
    assert b"I\0\0\0\x01" in row
    # The next attempt replaces the file, and a folder that cannot be written is named.
    with pytest.raises(ProtocolError, match=str(path)):
        through.capture(window, limits)
    (tmp_path / "file").write_text("")
    with pytest.raises(ProtocolError, match="was not written to"):
        through.capture(window, CaptureLimits(malformed_folder=str(tmp_path / "file")))
    proxy.repair()
    assert capturing.capture(window).row_count == 1


@pytest.mark.parametrize("is_kept", [False, True])
def test_bytes_that_are_no_frames_are_kept_only_on_request(
    capturing: Capturing, proxy: TcpProxy, tmp_path: Path, is_kept: bool
) -> None:
    """The reader thread finds such bytes. No message of them reaches the decoder."""
    relation_id, folder = _insert_secret(capturing), tmp_path / "kept"
    through = capturing.through(proxy.conninfo(capturing.conninfo))
    # XLogData with Insert: int and text of the row, each after its kind and its length.
    size = 4 + 25 + 8 + (5 + 1) + (5 + len(SECRET))
    proxy.damage(b"d" + size.to_bytes(4, "big") + b"w", b"d\0\0\0\x02w")
    window, before = through.window(), capturing.confirmed()
    limits = CaptureLimits(malformed_folder=str(folder) if is_kept else None)
    with pytest.raises(ProtocolError, match="the length 2 is impossible") as caught:
        through.capture(window, limits)
    error = str(caught.value)
    assert window.key in error
    assert SECRET.decode() not in error
    assert (capturing.confirmed(), capturing.rows()) == (before, [])
    if is_kept:
        [kept] = _read(folder / f"{capturing.slot}-{window.key}.messages")
        assert relation_id in kept
        assert SECRET in kept
    else:
        assert "stream.malformed_folder" in error
        assert not folder.exists()
    proxy.repair()
    assert capturing.capture(window).row_count == 1
