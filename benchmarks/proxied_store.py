"""An S3 server behind the proxy of the tests, which counts and delays requests."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from unittest.mock import patch

from pgcdc_assets.demo.object_store import ObjectStore
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets_tests.support.object_store import StoreProxy


@contextmanager
def proxied_store() -> Iterator[tuple[StoreProxy, Lake]]:
    """Yield the proxy and an empty lake, with the store's variables in the environment."""
    with tempfile.TemporaryDirectory() as folder, ObjectStore(Path(folder)) as store:
        proxy = StoreProxy(store.port)
        variables = {**store.environment, "AWS_ENDPOINT_URL": proxy.endpoint}
        with closing(proxy), patch.dict(os.environ, variables):
            yield proxy, Lake(store.lake)
