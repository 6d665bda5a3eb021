"""An HTTP proxy before the S3 server of the tests, in its own process.

The proxy counts requests and makes faults. It is a process of its own, because delta-rs holds the
interpreter's lock during some requests, so that a thread of the client's process could not answer.

Usage: python -m pgcdc_assets_tests.support.object_store_proxy SERVER_PORT
The first line of the output is the proxy's port. The tests control the proxy by requests to
`/_proxy`, see `object_store.StoreProxy`.
"""

from __future__ import annotations

import http.client
import json
import socket
import struct
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

CONTROL = "/_proxy"
_ANSWERS = {
    "SlowDown": (503, "Please reduce your request rate."),
    "ExpiredToken": (400, "The provided token has expired."),
}


@dataclass(frozen=True)
class Request:
    """A request of a client.

    Attributes:
        kind: GET, HEAD, PUT, DELETE, POST or LIST.
        key: the object's key; of a LIST its prefix.
        is_conditional: a PUT with If-None-Match.
        is_copy: a PUT whose content the server copies from another object.
        fault: the fault that the proxy made; empty: none.
    """

    kind: str
    key: str
    is_conditional: bool = False
    is_copy: bool = False
    fault: str = ""


@dataclass
class Fault:
    """A fault of the next requests of a kind.

    Attributes:
        what: `SlowDown` or `ExpiredToken`: answer so; `cut`: reset the connection; both before the
            server gets the request. With ` after`: the server does the request first. `delay`:
            wait before the request.
        kind: the kind of request; empty: every kind.
        contains: a part of the key.
        is_conditional: only conditional PUTs.
        times: number of requests.
        seconds: length of the delay.
    """

    what: str
    kind: str = ""
    contains: str = ""
    is_conditional: bool = False
    times: int = 1_000_000
    seconds: float = 0.0

    def meets(self, asked: Request) -> bool:
        return (
            self.kind in ("", asked.kind)
            and self.contains in asked.key
            and (asked.is_conditional or not self.is_conditional)
        )


class _Proxy(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, target: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = target
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.guard = threading.Lock()

    def next_fault(self, asked: Request) -> Fault | None:
        with self.guard:
            met = (fault for fault in self.faults if fault.times > 0 and fault.meets(asked))
            fault = next(met, None)
            if fault is not None:
                fault.times -= 1
            self.requests.append(replace(asked, fault=fault.what if fault else ""))
            return fault

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that a fault or a client has cut."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Proxy
    # Headers and body go out in one packet: the client's delayed acknowledgement costs 40 ms.
    wbufsize = -1
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        self.body = self._read_body()
        if url.path == CONTROL:
            self._control()
            return
        kind = self.command
        key = url.path.partition("/")[2].partition("/")[2]
        query = parse_qs(url.query)
        if kind == "GET" and "list-type" in query:
            kind, key = "LIST", query.get("prefix", [""])[0]
        conditional = kind == "PUT" and self.headers.get("If-None-Match") == "*"
        copies = kind == "PUT" and "x-amz-copy-source" in self.headers
        fault = self.server.next_fault(Request(kind, key, conditional, copies))
        if fault is None:
            self._forward()
        elif (code := fault.what.removesuffix(" after")) in _ANSWERS:
            status, message = _ANSWERS[code]
            if code != fault.what:
                self._ask().read()
            body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
            self._answer(status, body.encode())
        elif fault.what == "delay":
            time.sleep(fault.seconds)
            self._forward()
        else:
            if fault.what == "cut after":
                self._ask().read()
            self._cut()

    def handle_expect_100(self) -> bool:
        """Answer at once: the client sends the body of a PUT after this answer, or after 3 s."""
        answered = super().handle_expect_100()
        self.wfile.flush()
        return answered

    do_HEAD = do_PUT = do_DELETE = do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def _control(self) -> None:
        with self.server.guard:
            if self.command == "PUT":
                self.server.faults = [Fault(**each) for each in json.loads(self.body)]
            elif self.command == "DELETE":
                self.server.requests = []
            found = [asdict(each) for each in self.server.requests]
        self._answer(200, json.dumps(found).encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/xml")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.wfile.flush()

    def _cut(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _ask(self) -> http.client.HTTPResponse:
        client = http.client.HTTPConnection("127.0.0.1", self.server.target, timeout=60)
        client.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in ("expect", "transfer-encoding", "connection", "content-length"):
                client.putheader(name, value)
        if self.body or self.command in ("PUT", "POST"):
            client.putheader("Content-Length", str(len(self.body)))
        client.endheaders(self.body or None)
        return client.getresponse()

    def _forward(self) -> None:
        answer = self._ask()
        body = answer.read()
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else len(body)
        self.send_header("Content-Length", str(length or 0))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()


if __name__ == "__main__":
    proxy = _Proxy(int(sys.argv[1]))
    print(proxy.server_address[1], flush=True)
    # The end of the standard input is the end of the test process.
    threading.Thread(target=proxy.serve_forever, args=(0.05,), daemon=True).start()
    sys.stdin.read()
