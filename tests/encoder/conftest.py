from __future__ import annotations

import itertools

import pytest

_numbers = itertools.count(1)


@pytest.fixture
def name() -> str:
    """For an encoder's threads: no other test's."""
    return f"test {next(_numbers)};"
