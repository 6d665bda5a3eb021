"""Load the mutant in processes that tests start: Python executes this file at its start.

The environment names the module and a file with its changed source. Tracebacks and `__file__` name
the original.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any


class _Loader(SourceLoader):
    def __init__(self, fullname: str, original: str, changed: str) -> None:
        self._original = original
        self._changed = changed

    def get_filename(self, fullname: str) -> str:
        return self._original

    def get_data(self, path: Any) -> bytes:
        return Path(self._changed).read_bytes()


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        changed = os.environ.get("PGCDC_MUTANT_SOURCE")
        if not changed or fullname != os.environ.get("PGCDC_MUTANT_MODULE"):
            return None
        found = PathFinder.find_spec(fullname, path)
        assert found is not None and found.origin is not None
        loader = _Loader(fullname, found.origin, changed)
        return spec_from_file_location(fullname, found.origin, loader=loader)


sys.meta_path.insert(0, _Finder())
