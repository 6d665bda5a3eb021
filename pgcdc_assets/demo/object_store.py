"""An S3 server for the demonstrations and the tests: versitygw over a local folder.

Its conditional PUT is atomic, which the commits of Delta tables need. Other small servers check the
condition first and write later, so that two writers succeed
(docs/decisions/0060-s3-server-of-demo-and-tests.md).

The server listens on 127.0.0.1 only, with random credentials, and ends with its context manager. A
killed process leaves the server running; the next server over the same folder ends it.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from pgcdc_assets.demo.interrupts import interrupts_deferred
from pgcdc_assets.demo.object_store_program import install
from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.local import free_port

_SECONDS_TO_START = 30.0
_SECONDS_TO_STOP = 10.0
_POLL_SECONDS = 0.05


class ObjectStore:
    """A running S3 server over a folder, with one bucket `lake`. As a context manager, stop it.

    Args:
        folder: the folder of the objects, which is created and kept.
    """

    bucket = "lake"

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.access_key = "pgcdc"
        self.secret_key = secrets.token_hex(16)
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ObjectStore:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    @property
    def endpoint(self) -> str:
        """The server's URL."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def lake(self) -> str:
        """The URI of a lake in the bucket."""
        return f"s3://{self.bucket}/lake"

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment variables of clients."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
        }

    def start(self) -> ObjectStore:
        """Start the server, and wait until it accepts connections.

        Raises:
            ConfigurationError: the program is missing or ends.
        """
        program = install()
        self.end_earlier()
        objects, metadata = self.folder / "objects", self.folder / "metadata"
        (objects / self.bucket).mkdir(parents=True, exist_ok=True)
        metadata.mkdir(exist_ok=True)
        log = self.folder / "server.log"
        try:
            # An interrupt between the fork and the assignments would leave the server.
            with log.open("ab") as output, interrupts_deferred():
                self._process = subprocess.Popen(
                    [
                        str(program),
                        *("--port", f"127.0.0.1:{self.port}", "--quiet"),
                        # Not every file system has the extended attributes that versitygw uses.
                        *("posix", "--sidecar", str(metadata), str(objects)),
                    ],
                    # Not on the command line, which other users can read.
                    env={
                        **os.environ,
                        "ROOT_ACCESS_KEY_ID": self.access_key,
                        "ROOT_SECRET_ACCESS_KEY": self.secret_key,
                    },
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    # Ctrl-C must not end the server before its clients.
                    start_new_session=True,
                )
                self._pid_file.write_text(str(self._process.pid))
            self._wait(self._process, log)
        except BaseException:
            self.stop()
            raise
        return self

    def _wait(self, process: subprocess.Popen[bytes], log: Path) -> None:
        deadline = time.monotonic() + _SECONDS_TO_START
        while not _accepts(self.port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise ConfigurationError(reason=f"The S3 server did not start; its log is {log}")
            time.sleep(_POLL_SECONDS)

    @property
    def _pid_file(self) -> Path:
        return self.folder / "server.pid"

    def end_earlier(self) -> None:
        """End the server that a killed process left."""
        with suppress(FileNotFoundError, ValueError, psutil.NoSuchProcess):
            earlier = psutil.Process(int(self._pid_file.read_text()))
            # The number may belong to another process by now.
            if str(self.folder / "objects") in earlier.cmdline():
                earlier.terminate()
                try:
                    earlier.wait(_SECONDS_TO_STOP)
                except psutil.TimeoutExpired:
                    earlier.kill()

    def stop(self) -> None:
        """Stop the server; the objects stay."""
        process, self._process = self._process, None
        if process is None:
            return
        self._pid_file.unlink(missing_ok=True)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_SECONDS_TO_STOP)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _accepts(port: int) -> bool:
    with socket.socket() as client:
        client.settimeout(1)
        return client.connect_ex(("127.0.0.1", port)) == 0
