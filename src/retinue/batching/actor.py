"""One thread that owns what ``fn`` needs and runs one batch at a time: on_start, step, step, …, on_stop.

Where the backend is lost, the thread ends and a fresh one goes on: on_stop on the old, on_start on the new.

Thread rules
    ``run`` is a thread's whole life; ``build``, ``step``, ``tear_down`` and ``hand_on`` are what it is made
    of, and run there only (or by hand in a test). All other public methods may be called from any thread,
    ``fn`` included.
    ``_lock`` guards ``_state``, ``_waiting``, ``_retries``, ``_ceilings``, ``_asleep``, ``_enough``,
    ``_running``, ``_began_s``, ``_is_late``, ``_epitaph``, ``_hold``, ``_arrivals`` and every request; it is
    never held while ``fn``, a backend's hook, an observer or an event loop's callback runs.
    ``_untold``, ``_batches``, ``_ended_s``, ``_holding_since_s``, ``_lost`` and ``_rebuilds`` belong to the
    actor thread.
    A request ends when its ``remaining`` becomes 0, hence once; whoever ends it also tells its caller.
    Until then each of its works waits, runs, is to be run again or is answered: a crash can find them all.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import math
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from retinue.batching.hold import Hold, remaining_hold_s
from retinue.batching.isolation import Piece, Retries
from retinue.batching.memory import Ceilings, is_out_of_memory
from retinue.batching.outcome import (
    WORDS,
    Refused,
    Words,
    call_failed,
    describe,
    forget_frames,
    log_error,
    one_per_item,
    refused,
    shut_down,
    start_error,
    too_late,
    unavailable,
)
from retinue.batching.planner import Limits, Waiting, Work
from retinue.batching.records import BatchRecord, LifeRecord, Observer, Outcome, Pending
from retinue.batching.request import Request
from retinue.batching.tracing import Trace, Tracer
from retinue.errors import BackendLost, EncoderUnavailable, InvalidInput, Overloaded, RetinueError

logger = logging.getLogger("retinue")


class State(Enum):
    """The life of an actor; it only ever moves down this list, except from ``STUCK`` back to ``RUNNING``."""

    NEW = "new"
    STARTING = "starting"
    RUNNING = "running"  # also while a lost backend is built again
    STUCK = "stuck"  # takes none until the late call ends
    DRAINING = "draining"  # takes no more, serves what waits
    CLOSED = "closed"
    FAILED = "failed"


class Asleep(Enum):
    """What the actor thread is waiting for, and hence what must wake it."""

    NO = "no"
    IDLE = "idle"
    HOLDING = "holding"  # for company, unless there is enough of it


#: Arrivals that are kept for the hold to learn from, until a call ends; of a flood, the rest teaches nothing.
_MAX_ARRIVALS = 65_536

# An enum's members are slow to look up, and ``enqueue`` is where it shows.
_RUNNING = State.RUNNING
_AWAKE, _IDLE, _HOLDING = Asleep


def is_lost(error: BaseException) -> bool:
    """Whether ``error`` says that the backend must be built again; what a backend may override."""
    return isinstance(error, BackendLost)


@dataclass(frozen=True)
class Recovery:
    """What is done about failures; ``ThreadedMicroBatcher`` and ``VisionEncoderBackend`` document it."""

    may_repeat: bool = True
    is_out_of_memory: Callable[[BaseException], bool] = is_out_of_memory
    release_memory: Callable[[], object] | None = None
    is_fatal: Callable[[BaseException], bool] = is_lost
    max_rebuilds: int = 3
    rebuild_window_s: float = 300.0
    forward_timeout_s: float | None = None


RECOVERY = Recovery()


class Actor:
    """Runs ``fn`` on batches of what was enqueued; ``ThreadedMicroBatcher`` is its public face.

    ``clock``, ``alarm``: its time, and what its thread sleeps on; a simulation has its own.
    ``max_wait_s``: None for as long as is measured to pay. ``respawn``: starts a fresh thread that calls
    ``run``; without it a lost backend is not built again.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        limits: Limits,
        *,
        on_start: Callable[[], object] | None = None,
        on_stop: Callable[[], object] | None = None,
        max_wait_s: float | None = 0.0,
        max_pending_cost: int | None = None,
        recovery: Recovery = RECOVERY,
        respawn: Callable[[], object] | None = None,
        observer: Observer | None = None,
        words: Words = WORDS,
        clock: Callable[[], float] = time.monotonic,
        alarm: queue.SimpleQueue[None] | None = None,
    ) -> None:
        self.started: Future[None] = Future()  # settles when on_start has run
        self.stopped: Future[None] = Future()  # settles as the last thread's last act
        for milestone in (self.started, self.stopped):
            milestone.set_running_or_notify_cancel()  # no waiter can cancel it for the others
        self._fn = fn
        self._limits = limits
        self._on_start = on_start
        self._on_stop = on_stop
        self._max_wait_s = max_wait_s
        self._max_pending_cost = max_pending_cost
        self._recovery = recovery
        self._respawn = respawn
        self._words = words
        self._clock = clock
        self._tracer = Tracer(observer, clock)
        self._is_observed = observer is not None
        self._lock = threading.Lock()
        self._acquire, self._release = self._lock.acquire, self._lock.release
        self._state = State.NEW
        self._waiting = Waiting()
        self._retries = Retries()
        self._ceilings = Ceilings()
        self._abandoned: collections.deque[Request] = collections.deque()
        self._running: Piece | None = None  # until it is answered, or is to be run again
        self._began_s: float | None = None  # when the running call did
        self._is_late = False  # its callers were answered for it
        self._untold: Sequence[Request] = ()  # ended, and not told yet
        self._hold = Hold(limits)
        self._learns = max_wait_s is None
        self._arrivals: list[tuple[Hashable, float, int]] = []  # key, when and cost, since the hold was told
        self._batches = 0
        self._ended_s = -math.inf  # when the call before this one did
        self._holding_since_s: float | None = None
        self._asleep: Asleep = _AWAKE
        self._enough = Limits(limits.max_batch_cost, limits.max_batch_items)  # what ends a hold
        self._alarm: queue.SimpleQueue[None] = queue.SimpleQueue() if alarm is None else alarm
        self._thread_id = 0
        self._lost: BaseException | None = None
        self._epitaph = ""  # why it failed, or will unless the backend is built again
        self._rebuilds: collections.deque[float] = collections.deque()  # when, within the window

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
            self._state, self._epitaph = State.FAILED, "the batching thread could not be started"
        self.started.set_exception(EncoderUnavailable(self._epitaph))
        self.stopped.set_result(None)

    def lose_thread(self) -> None:
        """In a forked child: the thread stayed with the parent, so nobody serves requests here."""
        self._lock = threading.Lock()  # a thread that is not here may hold the other
        self._acquire, self._release = self._lock.acquire, self._lock.release
        self._state, self._epitaph = State.FAILED, "the batching thread stayed with the parent process"
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
                raise self._refusal()

    def pending(self) -> Pending:
        """What was accepted and is not answered yet."""
        with self._lock:
            waiting, retries, now_s = self._waiting, self._retries, self._clock()
            return Pending(
                items=len(waiting) + len(retries),
                cost=waiting.cost + retries.cost,
                expected_wait_s=self._expected_wait_s(now_s),
                oldest_wait_s=now_s - waiting.oldest()[2].arrived_s if waiting else None,
                running_cost=self._running_cost(),
                running_s=None if self._began_s is None else now_s - self._began_s,
                cost_ceiling=self._ceilings.lowest(),
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
        request.error = None
        request.trace = None
        self._acquire()  # not ``with``, which costs twice as much, here where it shows
        try:
            waiting = self._waiting
            if self._state is not _RUNNING:
                raise self._refusal()
            if self._max_pending_cost is not None:
                self._make_sure_of_room(sum(costs) if costs else count, self._max_pending_cost)
            request.arrived_s = now_s = self._clock()
            if self._is_observed:
                expected_wait_s = self._expected_wait_s(now_s)
                request.trace = Trace(costs or [1] * count, keys, waiting, expected_wait_s)
            request.first = waiting.arrivals
            request.remaining = count  # not before it is let in: nobody may end it who does not find it
            if count == 1 and costs is None and keys is None:
                waiting.add((items[0], 1, request, 0))
                if self._learns and len(self._arrivals) < _MAX_ARRIVALS:
                    self._arrivals.append((None, now_s, 1))
            else:
                self._add_all(request, items, costs)
            wake = self._asleep is not _AWAKE and (
                self._asleep is _IDLE or waiting.fills_a_batch(self._enough, self._ceilings)
            )
            if wake:
                self._asleep = _AWAKE
        finally:
            self._release()
        if wake:
            self._alarm.put(None)
        return request

    def enqueue_each(
        self,
        requests: Sequence[Request],
        items: Sequence[Any],
        costs: Sequence[int],
        keys: Sequence[Hashable],
    ) -> None:
        """Queue all of ``items`` or nothing, each as the ``Request.to_wake`` beside it; raises as
        ``enqueue``. To an observer they are one request, which ends with the last of them.
        """
        with self._lock:
            waiting = self._waiting
            if self._state is not _RUNNING:
                raise self._refusal()
            if self._max_pending_cost is not None:
                self._make_sure_of_room(sum(costs), self._max_pending_cost)
            now_s, trace = self._clock(), None
            if self._is_observed:
                expected_wait_s = self._expected_wait_s(now_s)
                trace = Trace(costs, keys, waiting, expected_wait_s, requests=len(requests))
            try:
                for request, item, cost, key in zip(requests, items, costs, keys, strict=True):
                    request.keys, request.results, request.error = (key,), [None], None
                    request.arrived_s, request.trace = now_s, trace
                    request.first, request.remaining = waiting.arrivals, 1
                    self._add_all(request, (item,), (cost,))
            except BaseException:  # no memory, or a key whose __eq__ raises
                for request in requests:
                    self._end(request)
                raise
            wake = self._asleep is not _AWAKE and (
                self._asleep is _IDLE or waiting.fills_a_batch(self._enough, self._ceilings)
            )
            if wake:
                self._asleep = _AWAKE
        if wake:
            self._alarm.put(None)

    def _make_sure_of_room(self, cost: int, bound: int) -> None:
        if cost > bound:
            raise InvalidInput(
                f"the request costs {cost}, which exceeds max_pending_cost={bound}; "
                f"it would need max_pending_cost={cost}"
            )
        pending = self._waiting.cost + self._retries.cost + self._running_cost()
        if (excess := pending + cost - bound) > 0:
            raise Overloaded(
                f"a cost of {pending} is pending and the request costs {cost}, "
                f"together more than max_pending_cost={bound}",
                retry_after=self._hold.seconds_for(excess),
            )

    def _add_all(self, request: Request, items: Sequence[Any], costs: Sequence[int] | None) -> None:
        keys = request.keys
        learns = self._learns and len(self._arrivals) < _MAX_ARRIVALS
        try:
            for index, item in enumerate(items):
                cost = 1 if costs is None else costs[index]
                key = keys and keys[index]
                self._waiting.add((item, cost, request, index), key)
                if learns:
                    self._arrivals.append((key, request.arrived_s, cost))
        except BaseException:  # no memory, or a key whose __eq__ raises
            self._end(request)
            raise

    def withdraw(self, request: Request) -> None:
        """End ``request`` because its caller left; what no batch has claimed never reaches ``fn``."""
        with self._lock:
            left = [request] if request.remaining else []
            self._end(request)
            wake = self._asleep is _HOLDING  # for what is the oldest now may fill a batch
            if wake:
                self._asleep = _AWAKE
        if wake:
            self._alarm.put(None)
        self._tracer.requests(left, left=True)

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
        self._announce(failed)

    def watch(self) -> float | None:
        """Answer for a call that is late; how many seconds later to look again, None if no call can be late.

        Whoever calls this whenever it says so finds each late call the moment that it is.
        """
        timeout_s = self._recovery.forward_timeout_s
        if timeout_s is None:
            return None
        with self._lock:
            if self._began_s is None or self._is_late:
                return timeout_s
            left_s = self._began_s + timeout_s - self._clock()
            if left_s > 0:
                return left_s
            self._is_late = True
            self._epitaph = f"a call has been running for more than forward_timeout_s={timeout_s:g}"
            if self._state is _RUNNING:
                self._state = State.STUCK
            dropped = self._drop_waiting()
            ended = self._blame(
                self._running.works if self._running else (),
                lambda what, _: too_late(what, self._words.call, timeout_s),
            )
            ended += self._fail(dropped, partial(unavailable, self._epitaph))
            record = LifeRecord("stuck", self._epitaph)
        with contextlib.suppress(Exception):
            logger.error("%s:\n%s", record.reason, _stack(self._thread_id))
        self._announce(ended)
        self._tracer.life(record)
        return timeout_s

    # ---- the actor thread

    def run(self) -> None:
        """A thread's whole life: build, serve until closed or lost, tear down. A fresh one may go on."""
        goes_on = False
        try:
            if self.build():
                self._serve()
                goes_on = self.hand_on()  # first, so that nobody waits for a close in vain
                self.tear_down()
            else:
                goes_on = self.hand_on()
        finally:
            if not goes_on:
                self._lost = None  # it keeps nothing of a call any more, nor of a caller
                self._abandoned.clear()
                self.stopped.set_result(None)

    def bury(self, reason: str) -> None:
        """In place of ``run``: the thread before this one does not end, so nothing can be built again."""
        with self._lock:
            self._epitaph = reason
        self._give_up(self._lost)
        self.stopped.set_result(None)

    def build(self) -> bool:
        """Run ``on_start``, and settle ``started`` if it is the first; False if there is nothing to serve."""
        is_first = not self.started.done()
        if not is_first and self.state is State.CLOSED:
            self._lost = None
            return False
        try:
            if self._on_start is not None:
                self._on_start()
        except BaseException as error:
            if is_first:
                with self._lock:
                    self._state, self._epitaph = State.FAILED, f"on_start failed: {describe(error)}"
                self.started.set_exception(start_error(error))
            else:
                self._lose(error, "the backend was lost and could not be built again")
            return False
        if not is_first:
            self._lost = None
            with self._lock:
                self._epitaph = ""
            logger.warning("the backend was built again")
            self._tracer.life(LifeRecord("rebuilt", ""))
        elif self.open():
            self.started.set_result(None)
        else:
            self.started.set_exception(EncoderUnavailable("shut down during start()"))
        return True

    def step(self) -> bool:
        """Run one batch of what waits now, or a piece of one that failed; False if there was none."""
        with self._lock:
            piece, left, self._untold, claimed_s = self._claim()
        if left:
            self._tracer.requests(left, left=True)
        if self._untold:
            self._announce(self._untold)
            self._untold = ()
        if piece is None:
            return False
        self._batches += 1
        works = piece.works
        bucket = self._limits.rung(piece.cost)
        if self._is_observed:
            self._tracer.claimed(works, self._batches, claimed_s)
        results, error, verdict = self._call([work[0] for work in works], bucket)
        ended_s = self._clock()
        if error is not None:
            forget_frames(error)
        with self._lock:
            was_late = self._leave_call()
            arrivals, self._arrivals = self._arrivals, []
            self._untold = self._settle(piece, results, error, verdict)
        self._tell(self._untold)
        outcome = "late" if was_late else verdict
        with self._lock:
            self._learn(arrivals)
            self._hold.called(piece.key, piece.cost, ended_s - claimed_s, ended_s, succeeded=outcome == "ok")
        if self._is_observed:
            self._report_batch(piece, bucket, claimed_s, ended_s, outcome)
            self._tracer.requests(self._untold)
        self._ended_s, self._holding_since_s = ended_s, None
        self._untold = ()
        if was_late:
            self._tracer.life(LifeRecord("back", f"the late call ended after {ended_s - claimed_s:g} s"))
        if error is not None:
            self._mend(error, verdict)
        # Whoever keeps a frame of fn, as a traceback does, keeps this frame too; not the batch with it.
        del piece, left, works, results, error
        return True

    def tear_down(self) -> None:
        """Run ``on_stop``."""
        try:
            if self._on_stop is not None:
                self._on_stop()
        except BaseException as error:
            log_error("on_stop raised", error)

    def hand_on(self) -> bool:
        """After the loss of the backend: let a fresh thread build it again, or give up and return False."""
        if self._lost is None:
            return False
        with self._lock:
            if self._state is State.DRAINING and not (self._waiting or self._retries):
                self._state = State.CLOSED
            if self._state is State.CLOSED:
                return False
        try:
            if self._respawn is not None and self._may_rebuild():
                self._respawn()
                return True
        except BaseException as error:  # no thread to be had, or the interpreter exits
            log_error("no thread for building the backend again", error)
        self._give_up(self._lost)
        return False

    def _may_rebuild(self) -> bool:
        """Whether one more rebuild is allowed now; counts it."""
        rebuilds, now_s = self._rebuilds, self._clock()
        while rebuilds and rebuilds[0] <= now_s - self._recovery.rebuild_window_s:
            rebuilds.popleft()
        if len(rebuilds) >= self._recovery.max_rebuilds:
            return False
        rebuilds.append(now_s)
        return True

    def _serve(self) -> None:
        try:
            while self._lost is None and self._wait_for_work():
                self.step()
        except BaseException as error:
            self._crash(error)

    def _wait_for_work(self) -> bool:
        """Sleep until a batch is due (True) or there is nothing left to serve (False)."""
        while True:
            with self._lock:
                self._asleep = _AWAKE
                if self._abandoned or self._retries:
                    return True
                if self._state is State.DRAINING and not self._waiting:
                    self._state = State.CLOSED
                if self._state is State.CLOSED:
                    return False
                hold_s = self._hold_s()
                if hold_s == 0:
                    return True
                self._asleep = _IDLE if hold_s is None else _HOLDING
            try:
                # Else ``get`` may sleep for ever, up to CPython 3.12, where its time is up before it sleeps.
                self._alarm.get_nowait()
            except queue.Empty:
                with contextlib.suppress(queue.Empty):
                    self._alarm.get(timeout=hold_s)

    def _hold_s(self) -> float | None:
        """Seconds until a batch is due unless there is ``_enough`` before; None if nothing waits."""
        waiting = self._waiting
        if not waiting:
            return None
        if self._max_wait_s == 0 or self._state is State.DRAINING:
            return 0.0
        now_s = self._clock()
        if self._max_wait_s is not None:
            hold_s = remaining_hold_s(
                oldest_wait_s=now_s - waiting.oldest()[2].arrived_s,
                max_wait_s=self._max_wait_s,
                full=waiting.fills_a_batch(self._limits, self._ceilings),
            )
        else:
            arrivals, self._arrivals = self._arrivals, []
            self._learn(arrivals)
            key, cost, most = waiting.next_in_line(self._limits, self._ceilings)
            held = self._hold.decide(key, cost, most, now_s)
            hold_s = held.seconds
            if hold_s:
                self._enough = Limits(math.ceil(held.cost), self._limits.max_batch_items)
        if hold_s and self._holding_since_s is None:
            self._holding_since_s = now_s
        return hold_s

    def _learn(self, arrivals: Iterable[tuple[Hashable, float, int]]) -> None:
        for arrival in arrivals:
            self._hold.arrived(*arrival)

    def _expected_wait_s(self, now_s: float) -> float:
        """How long, by what was measured, whoever comes now waits until a call begins."""
        ahead = self._waiting.cost + self._retries.cost
        wait_s = self._hold.seconds_for(ahead) if ahead else 0.0
        if self._running is not None and self._began_s is not None:
            wait_s += max(0.0, self._hold.seconds_for(self._running.cost) - (now_s - self._began_s))
        return wait_s

    def _claim(self) -> tuple[Piece | None, list[Request], list[Request], float]:
        """Make the next piece the running one, from now on.

        Also, the requests whose callers have left, and those that this ends.
        """
        left: list[Request] = []
        failed: list[Request] = []
        while self._abandoned:
            self._let_go(self._abandoned.popleft(), left)
        while self._retries:
            for piece in self._retries.take_unproven():
                failed += self._fail_unproven(piece)
            if self._retries:
                again = self._retries.take(partial(self._is_live, left), self._ceilings.of)
                if again is not None:
                    return again, left, failed, self._claimed(again)
        self._ceilings.settled()
        while self._waiting:
            plan = self._waiting.plan(self._limits, self._ceilings)
            cancelled = {work[2] for work in plan.works if work[2].future.cancelled()}
            if not cancelled:
                self._waiting.claim(plan)
                piece = Piece(plan.key, plan.works, plan.cost)
                return piece, left, failed, self._claimed(piece)
            for request in cancelled:  # its caller has not yet heard of it
                self._let_go(request, left)
        return None, left, failed, 0.0

    def _claimed(self, piece: Piece) -> float:
        self._running = piece
        self._thread_id = threading.get_ident()
        self._began_s = now_s = self._clock()
        return now_s

    def _leave_call(self) -> bool:
        """The call has ended; whether it was late, and requests are taken again."""
        self._running = self._began_s = None
        was_late, self._is_late = self._is_late, False
        if self._state is State.STUCK:
            self._state = _RUNNING
        return was_late

    def _running_cost(self) -> int:
        return 0 if self._running is None else self._running.cost

    def _is_live(self, left: list[Request], work: Work) -> bool:
        request: Request = work[2]
        if request.remaining and request.future.cancelled():
            self._let_go(request, left)
        return bool(request.remaining)

    def _let_go(self, request: Request, left: list[Request]) -> None:
        if request.remaining:
            self._end(request)
            left.append(request)

    def _call(
        self, items: list[Any], bucket: int | None
    ) -> tuple[Sequence[Any], BaseException | None, Outcome]:
        """What ``fn`` returned for ``items``, one result each, or what it raised."""
        expected = len(items)
        try:
            results = self._fn(items) if bucket is None else self._fn(items, target_bucket=bucket)
            return one_per_item(results, expected, self._words.call), None, "ok"
        except BaseException as error:  # SystemExit too: the caller's process is not fn's to end
            log_error(f"a call with {expected} items failed", error)
            return (), error, self._outcome(error)

    def _outcome(self, error: BaseException) -> Outcome:
        try:
            if self._recovery.is_fatal(error):
                return "lost"
            if self._recovery.is_out_of_memory(error):
                return "out_of_memory"
        except Exception as raised:
            log_error("is_fatal or is_out_of_memory raised", raised)
        return "failed"

    def _mend(self, error: BaseException, verdict: Outcome) -> None:
        """Do what the backend needs after this failure before it can serve again."""
        if verdict == "lost":
            self._lose(error, "the backend was lost")
        elif verdict == "out_of_memory" and self._recovery.release_memory is not None:
            try:
                self._recovery.release_memory()
            except Exception as raised:
                log_error("release_memory raised", raised)

    def _lose(self, error: BaseException, how: str) -> None:
        """The backend cannot serve before it is built again."""
        forget_frames(error)
        self._lost = error
        with self._lock:
            self._epitaph = f"{how}: {describe(error)}"
            record = LifeRecord("lost", self._epitaph)
        log_error(how, error)
        self._tracer.life(record)

    def _crash(self, error: BaseException) -> None:
        """The machinery itself failed: what it was about to run is run by the thread that goes on, if any."""
        forget_frames(error)
        with self._lock:
            piece = self._running
            self._leave_call()
            failed = [] if piece is None else self._recover(piece, error, "lost")
        self._tell(self._untold)  # maybe once more
        self._untold = ()
        self._announce(failed)
        self._lose(error, "the batching thread crashed")

    def _give_up(self, cause: BaseException | None) -> None:
        """The backend is not built again: end every live request, for there is nobody left to serve it."""
        with self._lock:
            self._state = State.FAILED
            if self._rebuilds:
                self._epitaph += (
                    f" (built again {len(self._rebuilds)} times within "
                    f"rebuild_window_s={self._recovery.rebuild_window_s:g}: max_rebuilds is spent)"
                )
            record = LifeRecord("failed", self._epitaph)
            failed = self._fail(self._drop_waiting(), partial(unavailable, self._epitaph, cause))
            self._abandoned.clear()
        self._announce(failed)
        self._tracer.life(record)

    # ---- endings: under the lock

    def _settle(
        self, piece: Piece, results: Sequence[Any], error: BaseException | None, verdict: Outcome
    ) -> list[Request]:
        """What becomes of ``piece`` now that its call has ended; return the requests that this ends."""
        if error is not None:
            ended = self._recover(piece, error, verdict)
        else:
            ended = self._hand_over(piece.works, results)
            self._retries.succeeded()
            if self._ceilings:
                self._ceilings.succeeded(piece.key, piece.cost)
        return ended

    def _recover(self, piece: Piece, error: BaseException, verdict: Outcome) -> list[Request]:
        """Have run again of a failed ``piece`` what may be; return the requests that this ends."""
        may_repeat = self._recovery.may_repeat and self._state is not State.CLOSED
        if verdict == "lost":
            if may_repeat and not piece.was_lost:
                self._retries.again(piece._replace(was_lost=True))
                return []
            return self._fail_piece(piece, error, "the backend was lost with it in flight; ")
        if verdict == "out_of_memory":
            if len(piece.works) > 1:
                self._ceilings.failed(piece.key, piece.cost)
                if may_repeat:
                    self._retries.again(piece)
                    return []
            else:
                self._ceilings.failed_alone(piece.key)
            return self._fail_piece(piece, error, f"out of memory at a cost of {piece.cost}; ")
        if may_repeat and self._retries.split(piece, error):
            return []
        return self._fail_piece(piece, error)

    def _fail_piece(self, piece: Piece, error: BaseException, why: str = "") -> list[Request]:
        call = self._words.call
        return self._blame(
            piece.works, lambda what, position: call_failed(f"{what}: {why}", error, call, position)
        )

    def _fail_unproven(self, piece: Piece) -> list[Request]:
        assert piece.isolation is not None
        return self._fail_piece(piece, piece.isolation.error, "no call was left to show it to be good; ")

    def _blame(
        self, works: Iterable[Work], error: Callable[[str, int | None], RetinueError]
    ) -> list[Request]:
        """``_fail`` with errors that name the request's own items among ``works``."""
        places: dict[Request, list[int]] = {}
        for _, _, request, index in works:
            places.setdefault(request, []).append(index)
        ended = []
        for request, indices in places.items():
            if request.remaining:
                what = self._words.place(indices, len(request.results))
                request.error = error(what, indices[0] if len(indices) == 1 else None)
                self._end(request)
                ended.append(request)
        return ended

    def _end(self, request: Request) -> None:
        """End ``request``, if it has not ended, without its results; what waits of it waits no more."""
        if request.remaining:
            request.remaining = 0
            if self._retries:
                self._retries.forget(request)
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
        works = [*self._retries.drop(), *self._waiting.works()]
        arrivals, self._waiting = self._waiting.arrivals, Waiting()
        self._waiting.arrivals = arrivals
        return works

    def _hand_over(self, works: Iterable[Work], results: Sequence[Any]) -> list[Request]:
        """Give each request its results; return those that this ends."""
        ended = []
        for (_, _, request, index), result in zip(works, results, strict=True):
            remaining = request.remaining
            if remaining:
                if type(result) is Refused:
                    what = self._words.place([index], len(request.results))
                    request.error = refused(what, result, index)
                    self._end(request)
                    ended.append(request)
                    continue
                request.results[index] = result
                request.remaining = remaining = remaining - 1
                if not remaining:
                    ended.append(request)
        return ended

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

    def _announce(self, ended: Sequence[Request]) -> None:
        self._tell(ended)
        self._tracer.requests(ended)

    def _report_batch(
        self, piece: Piece, bucket: int | None, claimed_s: float, ended_s: float, outcome: Outcome
    ) -> None:
        works = piece.works
        arrived_s = works[0][2].arrived_s
        held_s = 0.0 if self._holding_since_s is None else claimed_s - self._holding_since_s
        self._tracer.batch(
            BatchRecord(
                id=self._batches,
                items=len(works),
                requests=len({work[2].trace for work in works}),
                cost=piece.cost,
                key=piece.key,
                bucket=bucket,
                oldest_wait_s=claimed_s - arrived_s,
                held_s=held_s,
                gap_s=claimed_s - max(self._ended_s, arrived_s) - held_s,
                duration_s=ended_s - claimed_s,
                outcome=outcome,
                is_retry=piece.is_retry,
            )
        )

    # ---- refusals

    def _refusal(self) -> EncoderUnavailable:
        if self._state in (State.NEW, State.STARTING):
            return unavailable("submit() before start()")
        if self._state in (State.FAILED, State.STUCK):
            return unavailable(f"submit() after a failure: {self._epitaph}")
        return unavailable("submit() after shutdown()")


def _wake(futures: Iterable[asyncio.Future[None]]) -> None:
    """Runs on the callers' event loop."""
    for future in futures:
        try:  # noqa: SIM105  # suppress, or asking each whether it is done, costs more
            future.set_result(None)
        except asyncio.InvalidStateError:  # its caller left
            pass


def _stack(thread_id: int) -> str:
    """Where that thread is now."""
    frame = sys._current_frames().get(thread_id)
    return "(its thread has ended)" if frame is None else "".join(traceback.format_stack(frame)).rstrip()
