"""What a run of many tests needs: memory that is seen through fast, and cores that are not fought for."""

from __future__ import annotations

import gc
import os

if "PYTEST_XDIST_WORKER" in os.environ:  # which has one core: torch's other threads would only wait for it
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and for the processes that tests start


def pytest_collection_finish() -> None:
    """Leave all that was imported out of what the tests' many ``gc.collect()`` go through."""
    gc.collect()
    gc.freeze()
