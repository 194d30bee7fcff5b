"""How much memory a piece of work took at its peak, whoever allocated it: Python, Pillow, or a codec."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["within"]

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@contextlib.contextmanager
def within(most: int) -> Iterator[None]:
    """Fail if the process's resident memory, as Linux counts it, rises by more than ``most`` bytes meanwhile.

    What is allocated and not touched is not counted, for it takes no memory. All threads count.
    """
    if not _CLEAR.exists():
        pytest.skip("this kernel does not tell a process's peak of memory")
    _CLEAR.write_text("5")  # the peak is now
    before = _bytes("VmRSS")
    yield
    taken = _bytes("VmHWM") - before
    assert taken <= most, f"{taken} bytes at the peak, more than {most}"


def _bytes(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", _STATUS.read_text())
    assert found
    return 1024 * int(found[1])
