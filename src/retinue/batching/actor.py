"""One thread that owns what ``fn`` needs and runs one batch at a time: on_start, step, step, …, on_stop.

Thread rules
    ``run`` is the actor thread's whole life; ``step`` runs there only (or by hand in a test).
    All other public methods may be called from any thread, ``fn`` included.
    ``_lock`` guards ``_state``, ``_waiting``, ``_asleep``, ``_running_cost``, ``_began_s``, ``_pace`` and
    every request; it is never held while ``fn``, an observer or an event loop's callback runs.
    ``_running`` and ``_batches`` belong to the actor thread.
    A request ends when its ``remaining`` becomes 0, hence once; whoever ends it also tells its caller.
    Until then each of its works waits, runs or is answered, so that a crash can find them all.

The future in a ``Request`` only wakes the caller; the outcome lies beside it. So no exception ever sits in a
future, where nobody might retrieve it and where StopIteration cannot be put, and each caller raises an
exception of its own.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from enum import Enum
from functools import partial
from typing import Any, Literal, TypeAlias

from retinue.batching.hold import remaining_hold_s
from retinue.batching.outcome import (
    call_failed,
    crashed,
    forget_frames,
    log_error,
    one_per_item,
    shut_down,
    start_error,
)
from retinue.batching.pace import Pace
from retinue.batching.planner import Limits, Plan, Waiting, Work
from retinue.batching.records import BatchRecord, Observer, Pending, RequestRecord
from retinue.errors import EncoderUnavailable, InvalidInput, Overloaded, RetinueError


class State(Enum):
    """The life of an actor; it only ever moves down this list."""

    NEW = "new"
    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"  # takes no more, serves what waits
    CLOSED = "closed"
    FAILED = "failed"


class Asleep(Enum):
    """What the actor thread is waiting for, and hence what must wake it."""

    NO = "no"
    IDLE = "idle"
    HOLDING = "holding"  # for company, unless the batch fills


# An enum's members are slow to look up, and ``enqueue`` is where it shows.
_RUNNING = State.RUNNING
_AWAKE, _IDLE, _HOLDING = Asleep

Outcome: TypeAlias = Literal["ok", "failed"]


class Request:
    """One ``submit``. It ends once: with all results, with an ``error``, or because its caller left."""

    # Filled in by ``Actor.enqueue``: an ``__init__`` would be a tenth of what a request costs.
    __slots__ = ("error", "first", "future", "keys", "loop", "remaining", "results", "trace")

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]
    keys: Sequence[Hashable] | None
    results: list[Any]
    remaining: int  # results still to come; 0 once it has ended
    error: RetinueError | None
    first: int  # the arrival of its first item; the others follow without a gap
    trace: Trace | None

    @classmethod
    def to_wake(cls, future: asyncio.Future[None]) -> Request:
        """A request that is not queued yet, nor has it ended; ``future`` is what its caller waits for."""
        request = cls()
        request.loop, request.future = future.get_loop(), future
        request.remaining, request.error = 0, None
        return request


class Trace:
    """When a request came and what became of it; kept only where somebody asks."""

    __slots__ = ("ahead_cost", "ahead_items", "arrived_s", "batches", "claimed_s", "cost")

    def __init__(self, cost: int, arrived_s: float, waiting: Waiting) -> None:
        self.cost = cost
        self.arrived_s = arrived_s
        self.ahead_items = len(waiting)
        self.ahead_cost = waiting.cost
        self.claimed_s: float | None = None
        self.batches: list[int] = []


class Actor:
    """Runs ``fn`` on batches of what was enqueued; ``ThreadedMicroBatcher`` is its public face."""

    def __init__(
        self,
        fn: Callable[..., Any],
        limits: Limits,
        *,
        on_start: Callable[[], object] | None = None,
        on_stop: Callable[[], object] | None = None,
        max_wait_s: float = 0.0,
        max_pending_cost: int | None = None,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.started: Future[None] = Future()  # settles when on_start has run
        self.stopped: Future[None] = Future()  # settles as the thread's last act
        for milestone in (self.started, self.stopped):
            milestone.set_running_or_notify_cancel()  # no waiter can cancel it for the others
        self._fn = fn
        self._limits = limits
        self._on_start = on_start
        self._on_stop = on_stop
        self._max_wait_s = max_wait_s
        self._max_pending_cost = max_pending_cost
        self._observer = observer
        self._clock = clock
        self._is_traced = observer is not None or max_wait_s > 0
        self._lock = threading.Lock()
        self._acquire, self._release = self._lock.acquire, self._lock.release
        self._state = State.NEW
        self._waiting = Waiting()
        self._abandoned: collections.deque[Request] = collections.deque()
        self._running: Sequence[Work] = ()  # until their callers have been told
        self._running_cost = 0
        self._began_s: float | None = None  # when the running call did
        self._pace = Pace()
        self._batches = 0
        self._asleep: Asleep = _AWAKE
        self._alarm: queue.SimpleQueue[None] = queue.SimpleQueue()

    # ---- any thread

    @property
    def state(self) -> State:
        """Where in its life the actor is."""
        with self._lock:
            return self._state

    def begin(self) -> bool:
        """Claim the right to run it; True for the first caller only."""
        with self._lock:
            first = self._state is State.NEW
            if first:
                self._state = State.STARTING
            return first

    def give_up(self) -> None:
        """Its thread could not be started."""
        with self._lock:
            self._state = State.FAILED
        self.started.set_exception(EncoderUnavailable("the batching thread could not be started"))
        self.stopped.set_result(None)

    def lose_thread(self) -> None:
        """In a forked child: the thread stayed with the parent, so nobody serves requests here."""
        self._lock = threading.Lock()  # a thread that is not here may hold the other
        self._acquire, self._release = self._lock.acquire, self._lock.release
        self._state = State.FAILED
        if not self.stopped.done():
            self.stopped.set_result(None)

    def open(self) -> bool:
        """Take requests from now on; False if it was closed meanwhile."""
        with self._lock:
            if self._state is State.STARTING:
                self._state = State.RUNNING
            return self._state is State.RUNNING

    def check_open(self) -> None:
        """Raise ``EncoderUnavailable`` unless requests are taken."""
        with self._lock:
            if self._state is not State.RUNNING:
                raise _refusal(self._state)

    def pending(self) -> Pending:
        """What was accepted and is not answered yet."""
        with self._lock:
            waiting, now_s = self._waiting, self._clock()
            traced = self._is_traced and bool(waiting)
            return Pending(
                items=len(waiting),
                cost=waiting.cost,
                oldest_wait_s=now_s - waiting.oldest()[2].trace.arrived_s if traced else None,
                running_cost=self._running_cost,
                running_s=None if self._began_s is None else now_s - self._began_s,
            )

    def enqueue(
        self,
        loop: asyncio.AbstractEventLoop,
        items: Sequence[Any],
        costs: Sequence[int] | None = None,
        keys: Sequence[Hashable] | None = None,
        request: Request | None = None,
    ) -> Request:
        """Queue all of ``items`` or nothing, as a new request or as the given ``Request.to_wake``.

        ``EncoderUnavailable`` where nobody would serve them, ``Overloaded`` where there is no room.
        """
        count = len(items)
        if request is None:
            request = Request()
            request.loop = loop
            request.future = asyncio.Future(loop=loop)
        request.keys = keys
        request.results = [None] if count == 1 else [None] * count
        request.remaining = count
        request.error = None
        request.trace = None
        waiting = self._waiting
        self._acquire()  # not ``with``, which costs twice as much, here where it shows
        try:
            if self._state is not _RUNNING:
                raise _refusal(self._state)
            if self._max_pending_cost is not None:
                self._make_sure_of_room(sum(costs) if costs else count, self._max_pending_cost)
            if self._is_traced:
                request.trace = Trace(sum(costs) if costs else count, self._clock(), waiting)
            request.first = waiting.arrivals
            if count == 1 and costs is None and keys is None:
                waiting.add((items[0], 1, request, 0))
            else:
                self._add_all(request, items, costs)
            wake = self._asleep is not _AWAKE and (
                self._asleep is _IDLE or waiting.fills_a_batch(self._limits)
            )
            if wake:
                self._asleep = _AWAKE
        finally:
            self._release()
        if wake:
            self._alarm.put(None)
        return request

    def _make_sure_of_room(self, cost: int, bound: int) -> None:
        if cost > bound:
            raise InvalidInput(
                f"the request costs {cost}, which exceeds max_pending_cost={bound}; "
                f"it would need max_pending_cost={cost}"
            )
        pending = self._waiting.cost + self._running_cost
        if (excess := pending + cost - bound) > 0:
            raise Overloaded(
                f"a cost of {pending} is pending and the request costs {cost}, "
                f"together more than max_pending_cost={bound}",
                retry_after=self._pace.seconds_for(excess),
            )

    def _add_all(self, request: Request, items: Sequence[Any], costs: Sequence[int] | None) -> None:
        keys = request.keys
        try:
            for index, item in enumerate(items):
                cost = 1 if costs is None else costs[index]
                self._waiting.add((item, cost, request, index), keys and keys[index])
        except BaseException:  # no memory, or a key whose __eq__ raises
            self._end(request)
            raise

    def withdraw(self, request: Request) -> None:
        """End ``request`` because its caller left; what no batch has claimed never reaches ``fn``."""
        with self._lock:
            left = [request] if request.remaining else []
            self._end(request)
        self._report_requests(left, "left")

    def abandon(self, request: Request) -> None:
        """``withdraw`` for the garbage collector, which may run in a thread that holds the lock."""
        if request.remaining:
            self._abandoned.append(request)

    def close(self, *, drain: bool = False) -> None:
        """Take no more requests; fail those that wait, or serve them first. A running call finishes."""
        with self._lock:
            if self._state in (State.NEW, State.CLOSED, State.FAILED):
                return
            self._state = State.DRAINING if drain else State.CLOSED
            failed = [] if drain else self._fail(self._drop_waiting(), shut_down)
        self._alarm.put(None)
        self._tell(failed)
        self._report_requests(failed, "failed")

    # ---- the actor thread

    def run(self) -> None:
        """Be started, serve until closed, be stopped; this is the thread's whole life."""
        try:
            if self._start():
                self._serve()
        finally:
            self.stopped.set_result(None)

    def step(self) -> bool:
        """Plan one batch from all that waits now, run it and answer it; False if nothing waited."""
        with self._lock:
            plan, left, claimed_s = self._claim()
        self._report_requests(left, "left")
        if plan is None:
            return False
        self._batches += 1
        works = plan.works
        bucket = self._limits.rung(plan.cost)
        self._trace(works, claimed_s)
        results, error = self._call([work[0] for work in works], bucket)
        duration_s = self._clock() - claimed_s
        if error is not None:
            forget_frames(error)
        with self._lock:
            self._running_cost, self._began_s = 0, None
            self._pace.note(plan.cost, duration_s)
            if error is None:
                ended = self._hand_over(works, results)
            else:
                ended = self._fail(works, partial(call_failed, error))
        self._tell(ended)
        self._running = ()
        if self._observer is not None:
            outcome: Outcome = "ok" if error is None else "failed"
            self._report_batch(plan, bucket, claimed_s, duration_s, outcome)
            self._report_requests(ended, outcome)
        # Whoever keeps a frame of fn, as a traceback does, keeps this frame too; not the batch with it.
        del plan, left, works, results, error, ended
        return True

    def _start(self) -> bool:
        """Run ``on_start`` and settle ``started``; False if ``on_start`` failed."""
        try:
            if self._on_start is not None:
                self._on_start()
        except BaseException as error:
            with self._lock:
                self._state = State.FAILED
            self.started.set_exception(start_error(error))
            return False
        if self.open():
            self.started.set_result(None)
        else:
            self.started.set_exception(EncoderUnavailable("shut down during start()"))
        return True

    def _serve(self) -> None:
        try:
            while self._wait_for_work():
                self.step()
        except BaseException as error:
            self._crash(error)
            log_error("the batching thread crashed", error)
        finally:
            try:
                if self._on_stop is not None:
                    self._on_stop()
            except BaseException as error:
                log_error("on_stop raised", error)

    def _wait_for_work(self) -> bool:
        """Sleep until a batch is due (True) or there is nothing left to serve (False)."""
        while True:
            with self._lock:
                self._asleep = _AWAKE
                if self._abandoned:
                    return True
                if self._state is State.DRAINING and not self._waiting:
                    self._state = State.CLOSED
                if self._state is State.CLOSED:
                    return False
                hold_s = self._hold_s()
                if hold_s == 0:
                    return True
                self._asleep = _IDLE if hold_s is None else _HOLDING
            with contextlib.suppress(queue.Empty):
                self._alarm.get(timeout=hold_s)

    def _hold_s(self) -> float | None:
        """Seconds until a batch is due; None if nothing waits."""
        if not self._waiting:
            return None
        if self._max_wait_s == 0 or self._state is State.DRAINING:
            return 0.0
        return remaining_hold_s(
            oldest_wait_s=self._clock() - self._waiting.oldest()[2].trace.arrived_s,
            max_wait_s=self._max_wait_s,
            full=self._waiting.fills_a_batch(self._limits),
        )

    def _claim(self) -> tuple[Plan | None, list[Request], float]:
        """Make the next batch the running one, from now on; also, the requests whose callers have left."""
        left: list[Request] = []
        while self._abandoned:
            request = self._abandoned.popleft()
            if request.remaining:
                self._end(request)
                left.append(request)
        while self._waiting:
            plan = self._waiting.plan(self._limits)
            cancelled = {work[2] for work in plan.works if work[2].future.cancelled()}
            if not cancelled:
                self._running = plan.works
                self._running_cost = plan.cost
                self._waiting.claim(plan)
                self._began_s = now_s = self._clock()
                return plan, left, now_s
            for request in cancelled:  # its caller has not yet heard of it
                self._end(request)
                left.append(request)
        return None, left, 0.0

    def _call(self, items: list[Any], bucket: int | None) -> tuple[Sequence[Any], BaseException | None]:
        """What ``fn`` returned for ``items``, one result each, or what it raised."""
        expected = len(items)
        try:
            results = self._fn(items) if bucket is None else self._fn(items, target_bucket=bucket)
            return one_per_item(results, expected), None
        except BaseException as error:  # SystemExit too: the caller's process is not fn's to end
            log_error(f"a call with {expected} items failed", error)
            return (), error

    # ---- endings: under the lock

    def _end(self, request: Request) -> None:
        """End ``request``, if it has not ended, without its results; what waits of it waits no more."""
        if request.remaining:
            request.remaining = 0
            keys = request.keys
            for index in range(len(request.results)):
                self._waiting.remove(request.first + index, keys and keys[index])

    def _fail(self, works: Iterable[Work], error: Callable[[], RetinueError]) -> list[Request]:
        """End the requests of ``works``, each with an error of its own; return those that this ends."""
        ended = []
        for _, _, request, _ in works:
            if request.remaining:
                request.error = error()
                self._end(request)
                ended.append(request)
        return ended

    def _drop_waiting(self) -> list[Work]:
        """Let nothing wait any more, without a look at any key; return what did."""
        works = self._waiting.works()
        self._waiting = Waiting()
        return works

    def _hand_over(self, works: Iterable[Work], results: Sequence[Any]) -> list[Request]:
        """Give each request its results; return those that this ends."""
        ended = []
        for (_, _, request, index), result in zip(works, results, strict=True):
            remaining = request.remaining
            if remaining:
                request.results[index] = result
                request.remaining = remaining = remaining - 1
                if not remaining:
                    ended.append(request)
        return ended

    def _crash(self, cause: BaseException) -> None:
        """The machinery itself failed: end every live request, for there is nobody left to serve it."""
        forget_frames(cause)
        with self._lock:
            self._state = State.FAILED
            works = [*self._running, *self._drop_waiting()]
            failed = self._fail(works, partial(crashed, cause))
        self._tell(request for _, _, request, _ in works)  # also those that had ended, but were not told
        self._running = ()
        self._report_requests(failed, "failed")

    # ---- telling

    def _tell(self, ended: Iterable[Request]) -> None:
        """Wake the callers of ``ended``: one call into each of their event loops."""
        by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
        loop = None
        for request in ended:
            if request.loop is not loop:
                loop = request.loop
                futures = by_loop.setdefault(loop, [])
            futures.append(request.future)
        for loop, futures in by_loop.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed: its callers are gone
                loop.call_soon_threadsafe(_wake, futures)

    def _trace(self, works: Iterable[Work], claimed_s: float) -> None:
        if self._observer is not None:
            for request in {work[2] for work in works}:
                request.trace.batches.append(self._batches)
                if request.trace.claimed_s is None:
                    request.trace.claimed_s = claimed_s

    def _report_batch(
        self, plan: Plan, bucket: int | None, claimed_s: float, duration_s: float, outcome: Outcome
    ) -> None:
        record = BatchRecord(
            id=self._batches,
            items=len(plan.works),
            requests=len({work[2] for work in plan.works}),
            cost=plan.cost,
            key=plan.key,
            bucket=bucket,
            oldest_wait_s=claimed_s - plan.works[0][2].trace.arrived_s,
            duration_s=duration_s,
            outcome=outcome,
        )
        self._observe(record)

    def _report_requests(self, requests: Iterable[Request], outcome: Literal["ok", "failed", "left"]) -> None:
        for request in requests:
            trace = request.trace
            if trace is not None:
                claimed_s = trace.claimed_s
                record = RequestRecord(
                    items=len(request.results),
                    cost=trace.cost,
                    ahead_items=trace.ahead_items,
                    ahead_cost=trace.ahead_cost,
                    batches=tuple(trace.batches),
                    wait_s=None if claimed_s is None else claimed_s - trace.arrived_s,
                    total_s=self._clock() - trace.arrived_s,
                    outcome=outcome,
                )
                self._observe(record)

    def _observe(self, record: BatchRecord | RequestRecord) -> None:
        if self._observer is not None:
            try:
                if isinstance(record, BatchRecord):
                    self._observer.on_batch(record)
                else:
                    self._observer.on_request(record)
            except Exception as error:
                log_error("an observer raised", error)


def _wake(futures: Iterable[asyncio.Future[None]]) -> None:
    """Runs on the callers' event loop."""
    for future in futures:
        try:  # noqa: SIM105  # suppress, or asking each whether it is done, costs more
            future.set_result(None)
        except asyncio.InvalidStateError:  # its caller left
            pass


def _refusal(state: State) -> EncoderUnavailable:
    if state in (State.NEW, State.STARTING):
        return EncoderUnavailable("submit() before start()")
    if state is State.FAILED:
        return EncoderUnavailable("submit() after a crash: on_start failed or the batching thread died")
    return EncoderUnavailable("submit() after shutdown()")
