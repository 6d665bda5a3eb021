"""A share of the longest tests in each short run: `@pytest.mark.sampled`.

These tests take most of the time of all tests together. A short run (`-m "not soak"`) runs one of
`SHARE` of them. The seed of the run chooses, so each of the tests is run now and then, and `--seed`
repeats the choice of a failed run.
"""

from __future__ import annotations

import pytest

SHARE = 20


# The last of the hooks that run first: the tests of other kinds of session are already marked.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the sampled tests that the seed does not choose as `soak`."""
    sampled = [item for item in items if item.get_closest_marker("sampled") is not None]
    short = [item for item in sampled if item.get_closest_marker("soak") is None]
    for number, item in enumerate(sorted(short, key=lambda item: item.nodeid)):
        if (number + config.option.seed) % SHARE:
            item.add_marker(pytest.mark.soak)
