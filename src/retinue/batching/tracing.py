"""What an observer is told: kept and reported for the actor, and only where somebody asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from retinue.batching.outcome import log_error
from retinue.batching.planner import Waiting, Work
from retinue.batching.records import BatchRecord, LifeObserver, LifeRecord, Observer, RequestRecord

if TYPE_CHECKING:
    from retinue.batching.request import Request


class Trace:
    """What a request found when it came, and what became of it."""

    __slots__ = ("ahead_cost", "ahead_items", "batches", "claimed_s", "costs", "expected_wait_s")

    def __init__(self, costs: Sequence[int], waiting: Waiting, expected_wait_s: float) -> None:
        self.costs = tuple(costs)
        self.ahead_items = len(waiting)
        self.ahead_cost = waiting.cost
        self.expected_wait_s = expected_wait_s
        self.claimed_s: float | None = None
        self.batches: list[int] = []


class Tracer:
    """Makes an observer's records of what the actor says; without an observer it does nothing."""

    def __init__(self, observer: Observer | None, clock: Callable[[], float]) -> None:
        self._observer = observer
        self._clock = clock

    def claimed(self, works: Iterable[Work], batch: int, claimed_s: float) -> None:
        """A batch has claimed these works."""
        if self._observer is not None:
            for request in {work[2] for work in works}:
                request.trace.batches.append(batch)
                if request.trace.claimed_s is None:
                    request.trace.claimed_s = claimed_s

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
            if trace is not None:
                arrived_s, claimed_s, costs = request.arrived_s, trace.claimed_s, trace.costs
                outcome: Literal["ok", "failed", "left"] = "ok" if request.error is None else "failed"
                record = RequestRecord(
                    items=len(costs),
                    cost=sum(costs),
                    ahead_items=trace.ahead_items,
                    ahead_cost=trace.ahead_cost,
                    batches=tuple(trace.batches),
                    wait_s=None if claimed_s is None else claimed_s - arrived_s,
                    total_s=ended_s - arrived_s,
                    outcome="left" if left else outcome,
                    expected_wait_s=trace.expected_wait_s,
                    arrived_s=arrived_s,
                    costs=costs,
                    keys=tuple(request.keys or (None,) * len(costs)),
                )
                self._report(on_request, record)

    def life(self, record: LifeRecord) -> None:
        """Something befell the backend."""
        if isinstance(self._observer, LifeObserver):
            self._report(self._observer.on_life, record)

    def _report(self, to: Callable[..., None], record: object) -> None:
        try:
            to(record)
        except Exception as error:
            log_error("an observer raised", error)
