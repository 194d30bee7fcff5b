"""``ThreadedMicroBatcher``: the asyncio face of the one thread that runs batches.

Thread rules
    Every method may be called from any thread, from any event loop, and from ``fn``.
    ``submit`` belongs to the event loop that awaits it; any number of loops may submit at once.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

from retinue.batching import exit_hook
from retinue.batching.actor import Actor, Recovery, State, is_lost
from retinue.batching.memory import is_out_of_memory
from retinue.batching.outcome import WORDS, Words, forget_frames, logger
from retinue.batching.planner import Limits, positive_int
from retinue.batching.records import Observer, Pending
from retinue.batching.request import Request
from retinue.errors import InvalidInput

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
SelfT = TypeVar("SelfT", bound="ThreadedMicroBatcher[Any, Any]")


class ThreadedMicroBatcher(Generic[ItemT, ResultT]):
    """Runs ``fn(items) -> results`` on a thread of its own, on batches of what concurrent callers submit.

    ``fn`` gets a list and returns exactly one result per item, in order, as a list or tuple (or as an array
    whose first axis is the batch). With ``buckets`` it is called as ``fn(items, target_bucket=rung)``.

    ``max_batch_cost``, ``max_batch_items``: the most that one call gets; None for no cap.
    ``buckets``: costs for which a graph was captured, increasing, the last equal to ``max_batch_cost``.
    ``on_start``, ``on_stop``: run on the thread before the first and after the last call; ``on_stop`` runs
    once, if ``on_start`` succeeded, and what it raises is logged.
    ``max_wait_s``: how long an item may wait for company while the thread is free; 0 is eager. None: as long
    as measured durations and arrivals say that it pays, which is never for a request that is alone.
    ``max_pending_cost``: the most that may wait and run; beyond it ``submit`` refuses. None for no bound.
    ``may_repeat``: whether items of a call that failed may go through ``fn`` again: a failed batch of several
    requests is then split, so that only those items fail that fail on their own.
    ``is_out_of_memory(error)``: whether a batch is to be run again in smaller parts, after
    ``release_memory()`` on the thread; the default knows torch, CUDA and onnxruntime.
    ``is_fatal(error)``: whether ``on_stop`` and, on a fresh thread, ``on_start`` must run before the next
    call; the default is whether it is ``BackendLost``. That is done ``max_rebuilds`` times within
    ``rebuild_window_s`` at most, after which all requests get ``EncoderUnavailable``.
    ``forward_timeout_s``: how long a call may run before its callers get ``DeadlineExceeded``, and others,
    until it ends, ``EncoderUnavailable``; None for ever.
    ``observer``: gets a record of each batch and request (see ``retinue.batching.records``).
    ``join_timeout_s``: how long ``shutdown``, ``aclose`` and the interpreter's exit wait for a running call.
    """

    def __init__(
        self,
        fn: Callable[..., Sequence[ResultT]],
        *,
        max_batch_cost: int | None = None,
        max_batch_items: int | None = None,
        buckets: Sequence[int] | None = (),
        on_start: Callable[[], object] | None = None,
        on_stop: Callable[[], object] | None = None,
        max_wait_s: float | None = None,
        max_pending_cost: int | None = None,
        may_repeat: bool = True,
        is_out_of_memory: Callable[[BaseException], bool] = is_out_of_memory,
        release_memory: Callable[[], object] | None = None,
        is_fatal: Callable[[BaseException], bool] = is_lost,
        max_rebuilds: int = 3,
        rebuild_window_s: float = 300.0,
        forward_timeout_s: float | None = None,
        observer: Observer | None = None,
        name: str = "micro-batcher",
        join_timeout_s: float = 10.0,
        _words: Words = WORDS,
    ) -> None:
        self._limits = Limits(max_batch_cost, max_batch_items, tuple(buckets or ()))
        self._name = name
        self._join_timeout_s = _seconds(join_timeout_s, "join_timeout_s")
        self._actor = Actor(
            fn,
            self._limits,
            on_start=on_start,
            on_stop=on_stop,
            max_wait_s=None if max_wait_s is None else _seconds(max_wait_s, "max_wait_s"),
            max_pending_cost=pending_bound(max_pending_cost),
            recovery=Recovery(
                may_repeat=may_repeat,
                is_out_of_memory=is_out_of_memory,
                release_memory=release_memory,
                is_fatal=is_fatal,
                max_rebuilds=rebuild_bound(max_rebuilds),
                rebuild_window_s=_seconds(rebuild_window_s, "rebuild_window_s"),
                forward_timeout_s=forward_timeout(forward_timeout_s),
            ),
            respawn=self._respawn,
            observer=observer,
            words=_words,
        )
        self._watches = forward_timeout_s is not None
        self._thread = self._fresh_thread(None)

    # ---- life

    def start(self) -> None:
        """Start the thread and wait until ``on_start`` has run on it; raises what that raised.

        ``RuntimeError`` for a second start, also while the first still runs; ``EncoderUnavailable`` if it was
        shut down meanwhile.
        """
        self._spawn()
        try:
            self._actor.started.result()
        except Exception:
            self._thread.join()
            raise
        except BaseException:  # Ctrl-C while on_start runs
            self._actor.close()
            raise

    async def astart(self) -> None:
        """``start`` without blocking the event loop; a caller who leaves shuts it down."""
        self._spawn()
        try:
            await asyncio.wrap_future(self._actor.started)
        except Exception:
            await asyncio.wrap_future(self._actor.stopped)
            self._thread.join()
            raise
        except BaseException:
            self._actor.close()
            raise

    def shutdown(self, wait: bool = True, *, drain: bool = False) -> None:
        """Take no more requests, then end the thread; may be called at any moment, again, and from ``fn``.

        What waits fails with ``EncoderUnavailable``, or is served first with ``drain``. A running call
        finishes and is answered. ``wait`` blocks until the thread has ended, or for ``join_timeout_s``; on
        the thread itself it never blocks. Before ``start`` it does nothing.
        """
        self._actor.close(drain=drain)
        if wait and self._is_others_to_join():
            concurrent.futures.wait([self._actor.stopped], timeout=self._join_timeout_s)
            self._reap()

    async def aclose(self, *, drain: bool = False) -> None:
        """``shutdown`` without blocking the event loop."""
        self._actor.close(drain=drain)
        if self._is_others_to_join():
            stopped = asyncio.wrap_future(self._actor.stopped)
            try:
                await asyncio.wait({stopped}, timeout=self._join_timeout_s)
            finally:
                stopped.cancel()  # only our wait for it
            self._reap()

    async def __aenter__(self: SelfT) -> SelfT:
        await self.astart()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # ---- requests

    async def submit(
        self,
        items: Sequence[ItemT],
        costs: Sequence[int] | None = None,
        keys: Sequence[Hashable] | None = None,
    ) -> list[ResultT]:
        """Have ``items`` run, in any batches; return one result per item, in order.

        ``costs``: one positive int per item, 1 where not given. ``keys``: one hashable per item; only equal
        keys share a batch. The request enters whole or not at all. Cancelling it takes every item with
        it that no batch has claimed; a claimed one finishes and its result is dropped.

        Raises ``InvalidInput`` for costs or keys that cannot be, naming the item; ``EncoderFailed`` if ``fn``
        raised (``__cause__``) or broke its contract; ``Overloaded`` if ``max_pending_cost`` leaves no room;
        ``EncoderUnavailable`` before start, after shutdown and after a crash.
        """
        try:
            count = len(items)
            if costs is not None or keys is not None:
                costs, keys = self._checked(count, costs, keys)
            if not count:
                self._actor.check_open()
                return []
            request = self._actor.enqueue(asyncio.get_running_loop(), items, costs, keys)
        except BaseException as error:
            forget_frames(error)
            raise
        finally:
            del items, costs, keys  # a traceback through here must not keep them
        try:
            await request.future
        except GeneratorExit:
            self._actor.abandon(request)
            raise
        except BaseException:
            self._actor.withdraw(request)
            del request  # it may have results already, which a traceback through here must not keep
            raise
        if request.error is None:
            return request.results
        failure = request.error
        try:
            raise failure
        finally:
            del failure, request  # they would close a cycle with the traceback

    def enqueue(
        self, request: Request, items: Sequence[ItemT], costs: Sequence[int], keys: Sequence[Hashable]
    ) -> None:
        """``submit`` from any thread, for a caller who waits for the future of ``request``.

        Costs and keys have been checked. Whoever notices that the caller has left calls ``withdraw``.
        """
        self._actor.enqueue(request.loop, items, costs, keys, request)

    def enqueue_each(
        self,
        requests: Sequence[Request],
        items: Sequence[ItemT],
        costs: Sequence[int],
        keys: Sequence[Hashable],
    ) -> None:
        """``enqueue`` of several requests of one item each, in one step: all of them enter, or none."""
        self._actor.enqueue_each(requests, items, costs, keys)

    def withdraw(self, request: Request) -> None:
        """Its caller has left: what no batch has claimed never reaches ``fn``."""
        self._actor.withdraw(request)

    def abandon(self, request: Request) -> None:
        """``withdraw`` for the garbage collector, which may run in any thread at any moment."""
        self._actor.abandon(request)

    def pending(self) -> Pending:
        """What was accepted and is not answered yet, at this moment."""
        return self._actor.pending()

    def _checked(
        self, count: int, costs: Sequence[int] | None, keys: Sequence[Hashable] | None
    ) -> tuple[list[int] | None, list[Hashable] | None]:
        """``costs`` as ints and ``keys``, as many as there are items, or ``InvalidInput``."""
        for name, values in (("costs", costs), ("keys", keys)):
            if values is not None and len(values) != count:
                raise InvalidInput(f"{name} has {len(values)} entries for {count} items")
        if costs is not None:
            admit = self._limits.admit
            costs = [admit(cost, index, count) for index, cost in enumerate(costs)]
        if keys is not None:
            for index, key in enumerate(keys):
                _check_hashable(key, index, count)
            keys = list(keys)
        return costs, keys

    # ---- the thread

    def _spawn(self) -> None:
        if not self._actor.begin():
            raise RuntimeError(f"{self._name}: start() called twice")
        try:
            if self._watches:  # first: it ends by itself if the other cannot be started
                threading.Thread(target=self._watch, name=f"{self._name}-watch", daemon=True).start()
            self._begin()
        except Exception:
            self._actor.give_up()
            raise
        except BaseException:  # Ctrl-C: by now the thread may run
            self._actor.close()
            raise

    def _fresh_thread(self, previous: threading.Thread | None) -> threading.Thread:
        # Not a daemon: a daemon thread may be torn down in the middle of a call into the device.
        return threading.Thread(target=self._live, args=(previous,), name=self._name, daemon=False)

    def _begin(self) -> None:
        exit_hook.register(self._thread, self._actor, grace_s=self._join_timeout_s)
        self._thread.start()

    def _respawn(self) -> None:
        """On the thread that ends: let another go on in its place."""
        previous, self._thread = self._thread, self._fresh_thread(self._thread)
        try:
            self._begin()
        except BaseException:
            self._thread = previous
            raise

    def _live(self, previous: threading.Thread | None) -> None:
        """A thread's whole life, which begins when the one before it has ended."""
        if previous is not None:
            previous.join(self._join_timeout_s)
            if previous.is_alive():
                exit_hook.let_go(previous)
                self._actor.bury(
                    f"the backend was lost, and its close still runs {self._join_timeout_s:g} s later"
                )
                return
            exit_hook.forget(previous)
        self._actor.run()

    def _watch(self) -> None:
        """Answer for calls that are late, until the last thread has ended; a thread's whole life."""
        ended = threading.Event()
        self._actor.stopped.add_done_callback(lambda _: ended.set())
        while not ended.wait(self._actor.watch()):
            pass

    def _is_others_to_join(self) -> bool:
        return self._thread is not threading.current_thread() and self._actor.state is not State.NEW

    def _reap(self) -> None:
        if self._actor.stopped.done():
            if self._thread.ident is not None:  # None: it could not be started
                self._thread.join()  # it is past its last line
        else:
            logger.warning(
                "%s: a call still runs %g s after shutdown began (join_timeout_s); leaving it",
                self._name,
                self._join_timeout_s,
            )


def pending_bound(value: int | None) -> int | None:
    """``max_pending_cost``, checked."""
    return None if value is None else positive_int(value, "max_pending_cost must be None or a positive int")


def rebuild_bound(value: int) -> int:
    """``max_rebuilds``, checked."""
    return 0 if value == 0 else positive_int(value, "max_rebuilds must be an int >= 0")


def forward_timeout(value: float | None) -> float | None:
    """``forward_timeout_s``, checked."""
    if value is not None and _seconds(value, "forward_timeout_s") == 0:
        raise ValueError("forward_timeout_s must be None or more than 0")
    return value


def _check_hashable(key: Hashable, index: int, count: int) -> None:
    try:
        hash(key)
    except TypeError:
        raise InvalidInput(
            f"item {index + 1} of {count}: a key must be hashable, got {type(key).__name__}", position=index
        ) from None


def _seconds(value: float, name: str) -> float:
    if isinstance(value, bool) or not 0 <= value <= threading.TIMEOUT_MAX:
        raise ValueError(
            f"{name} must be a number of seconds from 0 to {threading.TIMEOUT_MAX:.0f}, got {value!r}"
        )
    return float(value)
