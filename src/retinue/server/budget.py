"""Memory that requests hold while they wait for the encoder, within one bound for all of them."""

from __future__ import annotations

from retinue.errors import Overloaded

__all__ = ["ByteBudget", "Holding"]

_RETRY_AFTER_S = 1.0  # what holds bytes is on its way through; how long that takes, nobody measures


class ByteBudget:
    """So many bytes for the bodies and pictures of all requests together. One event loop's."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0

    def holding(self) -> Holding:
        """What one request holds: nothing yet."""
        return Holding(self)


class Holding:
    """The bytes of one request, given back at the end of its ``with``."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._bytes = 0

    def reserve(self, size: int) -> None:
        """Hold ``size`` bytes more; ``Overloaded`` if there is no room for them."""
        budget = self._budget
        if budget.held_bytes + size > budget.max_bytes:
            raise Overloaded(
                f"images that wait hold {budget.held_bytes} bytes of max_pending_bytes={budget.max_bytes}, "
                f"and this request needs {size} more",
                retry_after=_RETRY_AFTER_S,
            )
        budget.held_bytes += size
        self._bytes += size

    def __enter__(self) -> Holding:
        return self

    def __exit__(self, *_: object) -> None:
        self._budget.held_bytes -= self._bytes
        self._bytes = 0
