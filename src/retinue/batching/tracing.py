"""What an observer is told: kept and reported for the actor, and only where somebody asks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from retinue.batching.outcome import log_error
from retinue.batching.planner import Waiting, Work
from retinue.batching.records import BatchRecord, LifeObserver, LifeRecord, Observer, RequestRecord

if TYPE_CHECKING:
    from retinue.batching.request import Request


class Trace:
    """What a request found when it came, and what became of it; one for all that came in one step."""

    __slots__ = (
        "ahead_cost",
        "ahead_items",
        "batches",
        "claimed_s",
        "costs",
        "expected_wait_s",
        "keys",
        "outcome",
        "requests",
    )

    def __init__(
        self,
        costs: Sequence[int],
        keys: Sequence[Hashable] | None,
        waiting: Waiting,
        expected_wait_s: float,
        *,
        requests: int = 1,
    ) -> None:
        self.costs = tuple(costs)
        self.keys = tuple(keys or [None] * len(self.costs))
        self.requests = requests  # that have not ended
        self.outcome: Literal["ok", "failed", "left"] = "ok"  # the first other one of theirs
        self.ahead_items = len(waiting)
        self.ahead_cost = waiting.cost
        self.expected_wait_s = expected_wait_s
        self.claimed_s: float | None = None
        self.batches: list[int] = []


class Tracer:
    """Makes an observer's records of what the actor says; without an observer it does nothing.

    Any thread may call it; ``_lock`` guards how traces end.
    """

    def __init__(self, observer: Observer | None, clock: Callable[[], float]) -> None:
        self._observer = observer
        self._clock = clock
        self._lock = threading.Lock()

    def claimed(self, works: Iterable[Work], batch: int, claimed_s: float) -> None:
        """A batch has claimed these works."""
        if self._observer is not None:
            for trace in {work[2].trace for work in works}:
                trace.batches.append(batch)
                if trace.claimed_s is None:
                    trace.claimed_s = claimed_s

    def batch(self, record: BatchRecord) -> None:
        """A call has ended."""
        if self._observer is not None:
            self._report(self._observer.on_batch, record)

    def requests(self, requests: Sequence[Request], *, left: bool = False) -> None:
        """These requests have ended, or their callers have left."""
        if self._observer is None or not requests:
            return
        ended_s, on_request = self._clock(), self._observer.on_request
        for request in requests:
            trace = request.trace
            if trace is not None and self._is_last(request, trace, left=left):
                arrived_s, claimed_s, costs = request.arrived_s, trace.claimed_s, trace.costs
                record = RequestRecord(
                    items=len(costs),
                    cost=sum(costs),
                    ahead_items=trace.ahead_items,
                    ahead_cost=trace.ahead_cost,
                    batches=tuple(trace.batches),
                    wait_s=None if claimed_s is None else claimed_s - arrived_s,
                    total_s=ended_s - arrived_s,
                    outcome=trace.outcome,
                    expected_wait_s=trace.expected_wait_s,
                    arrived_s=arrived_s,
                    costs=costs,
                    keys=trace.keys,
                )
                self._report(on_request, record)

    def _is_last(self, request: Request, trace: Trace, *, left: bool) -> bool:
        """Whether all requests of ``trace`` have ended, now that this one has."""
        with self._lock:
            trace.requests -= 1
            if trace.outcome == "ok" and (left or request.error is not None):
                trace.outcome = "left" if left else "failed"
            return not trace.requests

    def life(self, record: LifeRecord) -> None:
        """Something befell the backend."""
        if isinstance(self._observer, LifeObserver):
            self._report(self._observer.on_life, record)

    def _report(self, to: Callable[..., None], record: object) -> None:
        try:
            to(record)
        except Exception as error:
            log_error("an observer raised", error)
