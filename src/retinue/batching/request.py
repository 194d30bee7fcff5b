"""One ``submit`` on its way.

The future only wakes the caller; the outcome lies beside it. So no exception ever sits in a future, where
nobody might retrieve it and where StopIteration cannot be put, and each caller raises one of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from typing import Any

from retinue.batching.tracing import Trace
from retinue.errors import RetinueError


class Request:
    """It ends once: with all results, with an ``error``, or because its caller left."""

    # Filled in by ``Actor.enqueue``: an ``__init__`` would be a tenth of what a request costs.
    __slots__ = (
        "arrived_s",
        "error",
        "first",
        "future",
        "keys",
        "loop",
        "remaining",
        "results",
        "trace",
    )

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]
    keys: Sequence[Hashable] | None
    results: list[Any]
    remaining: int  # results still to come; 0 once it has ended
    error: RetinueError | None
    arrived_s: float  # on the actor's clock
    first: int  # the arrival of its first item; the others follow without a gap
    trace: Trace | None

    @classmethod
    def to_wake(cls, future: asyncio.Future[None]) -> Request:
        """A request that is not queued yet, nor has it ended; ``future`` is what its caller waits for."""
        request = cls()
        request.loop, request.future = future.get_loop(), future
        request.remaining, request.error = 0, None
        return request
