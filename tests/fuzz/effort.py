"""How much fuzzing a run does: a little, always the same; with RETINUE_SOAK=1 much, and other every time."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

__all__ = ["LIMIT_S", "effort"]

_SOAK = os.environ.get("RETINUE_SOAK") == "1"
_MORE = 40  # times as many examples in a soak

#: Seconds for a test that fuzzes.
LIMIT_S = 3600 if _SOAK else 120


def effort(examples: int) -> settings:
    """So many examples; a soak tries forty times as many, and others every time."""
    return settings(
        max_examples=examples * (_MORE if _SOAK else 1),
        derandomize=not _SOAK,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
