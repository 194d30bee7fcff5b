"""How fast requests have been served lately: pure, fed by the door with what it measured."""

from __future__ import annotations

__all__ = ["Pace"]

_KEPT = 0.9  # of the past, with each call
_UNKNOWN_S = 1.0  # before the first call has ended


class Pace:
    """Cost per second of recent calls; a call counts a tenth of all that came before it."""

    __slots__ = ("_cost", "_seconds")

    def __init__(self) -> None:
        self._cost = 0.0
        self._seconds = 0.0

    def note(self, cost: int, duration_s: float) -> None:
        """A call of ``cost`` took so long."""
        self._cost = self._cost * _KEPT + cost
        self._seconds = self._seconds * _KEPT + duration_s

    def seconds_for(self, cost: int) -> float:
        """How long it takes to serve ``cost``, at the present pace."""
        return _UNKNOWN_S if self._cost == 0 else cost * self._seconds / self._cost
