"""How long the next batch waits for company: a function of data, no clock."""

from __future__ import annotations


def remaining_hold_s(*, oldest_wait_s: float, max_wait_s: float, full: bool) -> float:
    """Seconds that the next batch may still wait for company, 0 when it is due.

    ``oldest_wait_s``: how long its oldest item has waited. ``full``: whether more company could not join it.
    """
    return 0.0 if full else max(0.0, max_wait_s - oldest_wait_s)
