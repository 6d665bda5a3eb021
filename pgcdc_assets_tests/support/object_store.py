"""The S3 server of the tests, and the proxy before it.

The server is versitygw (`demo/object_store.py`), one for each test process. Without Go its program
cannot be built, and the tests are skipped by name; in CI they fail.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import pytest
from deltalake import DeltaTable

from pgcdc_assets.demo.object_store import ObjectStore
from pgcdc_assets.demo.object_store_program import install
from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets_tests.support.object_store_proxy import CONTROL, Fault, Request

_LOG_ENTRY = re.compile(r"/_delta_log/\d{20}\.json$")


class StoreProxy:
    """The proxy before the S3 server: it counts requests and makes faults."""

    def __init__(self, target: int) -> None:
        program = "pgcdc_assets_tests.support.object_store_proxy"
        self._process = subprocess.Popen(
            [sys.executable, "-m", program, str(target)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self.endpoint = f"http://127.0.0.1:{int(self._process.stdout.readline())}"

    def close(self) -> None:
        """End the proxy."""
        self._process.kill()
        self._process.communicate()

    @property
    def requests(self) -> list[Request]:
        """The requests since the last `forget`."""
        return [Request(**each) for each in self._control("GET")]

    def counts(self) -> Counter[str]:
        """Return the number of requests by kind since the last `forget`."""
        return Counter(request.kind for request in self.requests)

    def faults(self) -> Counter[str]:
        """Return the number of requests by the fault that they met, since the last `forget`."""
        return Counter(request.fault for request in self.requests if request.fault)

    def log_entries(self) -> list[Request]:
        """Check that each log entry since `forget` is a conditional PUT; return these PUTs."""
        puts = [each for each in self.requests if each.kind == "PUT"]
        found = [each for each in puts if _LOG_ENTRY.search(each.key)]
        assert [each.key for each in found if not each.is_conditional] == []
        return found

    def forget(self) -> None:
        """Count from zero."""
        self._control("DELETE")

    @contextmanager
    def making(self, *faults: Fault) -> Iterator[None]:
        """Make faults during the block."""
        self._control("PUT", [asdict(fault) for fault in faults])
        try:
            yield
        finally:
            self._control("PUT", [])

    def _control(self, method: str, body: list[dict[str, object]] | None = None) -> list[dict]:  # type: ignore[type-arg]
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.endpoint + CONTROL, data=data, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: list[dict[str, object]] = json.load(answer)
        return found


def check_commits(proxy: StoreProxy, lake: Lake, path: str, operation: str) -> None:
    """Check that a table has commits of an operation, and that each was a conditional PUT."""
    table = DeltaTable(path, storage_options=lake.delta_options)
    versions = [each["version"] for each in table.history() if each["operation"] == operation]
    assert versions, operation
    for version in versions:
        name = f"{path.partition('://')[2].partition('/')[2]}/_delta_log/{version:020}.json"
        puts = [each for each in proxy.requests if (each.kind, each.key) == ("PUT", name)]
        assert puts and all(each.is_conditional for each in puts), (name, puts)


@pytest.fixture(scope="session")
def object_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """The S3 server of the test process."""
    try:
        install()
    except ConfigurationError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    with ObjectStore(tmp_path_factory.mktemp("object_store")) as store:
        yield store


@pytest.fixture(scope="session")
def shared_proxy(object_store: ObjectStore) -> Iterator[StoreProxy]:
    """The proxy of the test process."""
    proxy = StoreProxy(object_store.port)
    yield proxy
    proxy.close()


@pytest.fixture
def store_proxy(
    object_store: ObjectStore, shared_proxy: StoreProxy, monkeypatch: pytest.MonkeyPatch
) -> StoreProxy:
    """The proxy, whose endpoint and credentials are in the environment."""
    for name, value in object_store.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", shared_proxy.endpoint)
    shared_proxy.forget()
    return shared_proxy


@pytest.fixture
def s3_lake(store_proxy: StoreProxy, request: pytest.FixtureRequest) -> Lake:
    """An empty lake of the test in the S3 server."""
    name = "".join(c if c.isalnum() else "_" for c in request.node.name)
    return Lake(f"s3://{ObjectStore.bucket}/{name}-{time.time_ns()}")
