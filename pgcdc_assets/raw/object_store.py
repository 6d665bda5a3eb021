"""Arrow file systems of object stores.

delta-rs lists and deletes objects. For S3, Arrow's own client reads and writes objects: delta-rs
holds the interpreter's lock while it opens an object, so that a slow store would delay the status
packets of a running capture. Arrow does not delete, because it creates a marker of the folder.
"""

from __future__ import annotations

import io
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.fs as pafs
from deltalake.fs import DeltaStorageHandler

from pgcdc_assets.raw.lake import Lake

_CONNECT_SECONDS = 10.0
_ATTEMPTS = 6


def object_store(lake: Lake, uri: str) -> pafs.FileSystem:
    """Return a file system whose root is a folder of an object store.

    Raises:
        ConfigurationError: the environment variable of a credential is not set.
    """
    client = None
    if lake.is_s3:
        client = _s3_client(
            lake.storage.found_endpoint,
            lake.storage.found_region,
            lake.storage.uses_path_style,
            *lake.storage.credentials(),
        )
    return pafs.PyFileSystem(_Handler(uri, lake.delta_options, client))


class _Handler(DeltaStorageHandler):
    """A handler of delta-rs whose objects are read and written by Arrow, if there is a client."""

    def __init__(self, uri: str, options: dict[str, str] | None, client: Any) -> None:
        super().__init__(uri, options)
        parts = urlsplit(uri)
        self._root = f"{parts.netloc}/{parts.path.strip('/')}"
        self._client = client

    def open_input_stream(self, path: str) -> Any:
        if self._client is None:
            return super().open_input_stream(path)
        return self._client.open_input_stream(f"{self._root}/{path}")

    def open_input_file(self, path: str) -> Any:
        if self._client is None:
            return super().open_input_file(path)
        return self._client.open_input_file(f"{self._root}/{path}")

    def copy_file(self, src: str, dst: str) -> None:
        # The method of delta-rs 1.x passes a keyword that its own handler does not have.
        self._handler.copy_file(src, dst)

    def open_output_stream(self, path: str, metadata: dict[str, str] | None = None) -> Any:
        if self._client is None:
            return pa.PythonFile(_Sink(self._handler.open_output_stream(path, metadata)), "w")
        return self._client.open_output_stream(f"{self._root}/{path}")


class _Sink(io.RawIOBase):
    """A sink of delta-rs, which accepts bytes only."""

    def __init__(self, sink: Any) -> None:
        self._sink = sink

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        content = bytes(data)
        self._sink.write(content)
        return len(content)

    def close(self) -> None:
        if not self.closed:
            self._sink.close()
        super().close()


@lru_cache(maxsize=8)
def _s3_client(
    endpoint: str,
    region: str,
    uses_path_style: bool,
    access_key: str | None,
    secret_key: str | None,
    token: str | None,
) -> pafs.S3FileSystem:
    place = urlsplit(endpoint)
    return pafs.S3FileSystem(
        access_key=access_key,
        secret_key=secret_key,
        session_token=token,
        region=region or None,
        scheme=place.scheme or "https",
        endpoint_override=place.netloc or None,
        force_virtual_addressing=bool(endpoint) and not uses_path_style,
        connect_timeout=_CONNECT_SECONDS,
        # A small object is one PUT.
        allow_delayed_open=True,
        retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS),
    )
