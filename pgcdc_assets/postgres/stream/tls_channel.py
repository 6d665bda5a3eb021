"""TLS over a socket, on large reads.

The server sends one TLS record per message. OpenSSL on a socket makes two system calls per record;
here one system call receives up to a megabyte, and OpenSSL decrypts the records in memory.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable
from typing import cast

from pgcdc_assets.postgres.stream.tls_settings import ALPN, TlsSettings

_RECEIVE_BYTES = 1024 * 1024
_TERMINATE = b"X\0\0\0\4"


class TlsChannel:
    """An encrypted connection. Several threads may call `send`; one thread receives and reads.

    Args:
        source: the connected socket, in blocking mode.
        tls: the settings of the encryption.

    Attributes:
        socket: the socket.
        has_rest: received bytes wait to be read.
        is_ended: the server has ended the encrypted connection.
    """

    def __init__(self, source: socket.socket, tls: TlsSettings) -> None:
        self.socket = source
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = tls.context.wrap_bio(
            self._incoming, self._outgoing, server_hostname=tls.server_hostname
        )
        self._is_direct = tls.is_direct
        self._ciphertext = memoryview(bytearray(_RECEIVE_BYTES))
        # OpenSSL's object serves one thread at a time. A thread that waits for the socket holds the
        # lock of sending only, so that reading continues.
        self._tls_lock = threading.Lock()
        self._send_lock = threading.Lock()
        self.has_rest = False
        self.is_ended = False

    def shake_hands(self, wait: Callable[[], None]) -> None:
        """Negotiate the encryption and verify the server.

        Args:
            wait: function that waits until the socket is readable, or raises an error.

        Raises:
            ssl.SSLError: the server's certificate was refused, or the negotiation failed.
            OSError: the connection was lost.
        """
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush()
                wait()
                if self.receive() == 0:
                    raise ConnectionResetError("the server closed the connection") from None
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    self._flush()
                raise
        self._flush()
        # A server before version 17 negotiates no protocol. After a direct start the protocol
        # proves that the server speaks Postgres (fe-connect.c, CONNECTION_SSL_STARTUP).
        chosen = self._tls.selected_alpn_protocol()
        if chosen != ALPN and (self._is_direct or chosen is not None):
            raise ConnectionError("the server did not negotiate the protocol postgresql")

    def certificate(self) -> bytes | None:
        """Return the server's certificate in DER form."""
        return self._tls.getpeercert(binary_form=True)

    def receive(self, flags: int = 0, limit: int = _RECEIVE_BYTES) -> int:
        """Receive once, up to `limit` encrypted bytes. Return their number; 0: the end.

        Raises:
            BlockingIOError: no byte was received.
            OSError: the connection was lost.
        """
        count = self.socket.recv_into(self._ciphertext, min(limit, _RECEIVE_BYTES), flags)
        with self._tls_lock:
            self._incoming.write(self._ciphertext[:count])
        return count

    def read_into(self, place: memoryview) -> int:
        """Decrypt received records until `place` is full or no record is complete.

        Return the number of bytes.

        Raises:
            ssl.SSLError: a record is damaged, or the server reported an error of the encryption.
            OSError: the connection was lost.
        """
        filled, room = 0, len(place)
        # With a buffer the method returns a number, which typeshed does not know.
        read = cast(Callable[[int, memoryview], int], self._tls.read)
        with self._tls_lock:
            try:
                while filled < room:
                    count = read(room - filled, place[filled:])
                    if count == 0:
                        self.is_ended = True
                        break
                    filled += count
                self.has_rest = not self.is_ended
            except ssl.SSLWantReadError:
                self.has_rest = False
        if self._outgoing.pending:
            # The reply to the server's update of its keys.
            self._flush()
        return filled

    def send(self, data: bytes) -> None:
        """Encrypt and send.

        Raises:
            OSError: the connection was lost.
        """
        with self._send_lock:
            with self._tls_lock:
                self._tls.write(data)
                encrypted = self._outgoing.read()
            self.socket.sendall(encrypted)

    def close(self) -> None:
        """Tell the server, if the socket takes the bytes, and close the socket."""
        with contextlib.suppress(OSError), self._tls_lock:
            self._tls.write(_TERMINATE)
            with contextlib.suppress(ssl.SSLError):
                self._tls.unwrap()
            self.socket.send(self._outgoing.read(), socket.MSG_DONTWAIT)
        self.socket.close()

    def _flush(self) -> None:
        with self._send_lock:
            with self._tls_lock:
                encrypted = self._outgoing.read()
            self.socket.sendall(encrypted)
