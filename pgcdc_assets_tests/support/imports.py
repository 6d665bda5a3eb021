"""The imports between the modules of the package, as import-linter finds them."""

from __future__ import annotations

from collections.abc import Mapping
from graphlib import TopologicalSorter

import grimp


def imports_of(package: str) -> dict[str, set[str]]:
    """Return the modules of the package that each module imports, also for its types alone."""
    graph = grimp.build_graph(package, cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def longest_chains(imports: Mapping[str, set[str]], within: str) -> dict[str, tuple[str, ...]]:
    """Return the longest chain of imports that begins with each module of a package.

    Raises:
        graphlib.CycleError: modules import each other in a circle.
    """
    chains: dict[str, tuple[str, ...]] = {}
    for module in TopologicalSorter(imports).static_order():
        if module.startswith(within):
            below = [chains[each] for each in sorted(imports[module]) if each in chains]
            chains[module] = (module, *max(below, key=len, default=()))
    return chains
