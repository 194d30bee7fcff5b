"""Runs a schedule on a real batcher, on one thread, and compares all that happens with the model's books.

The batcher's own ``run`` is the thread's life here too. Wherever it would sleep or step, and where it calls
``fn``, a hook, an observer or an event loop, the driver is asked, and plays what the schedule says that
others do meanwhile. So nothing depends on real time or threads, and a schedule always goes the same way.

One moment is left out: nothing is played between the choice of a batch and its call, for what the batch
claimed cannot be seen from outside before ``fn`` gets it.
"""

from __future__ import annotations

import gc
import itertools
import logging
import queue
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from retinue.batching import BatchRecord, RequestRecord, ThreadedMicroBatcher
from retinue.batching.actor import Actor, Recovery, State
from retinue.batching.planner import Limits
from retinue.batching.records import LifeRecord
from retinue.errors import RetinueError

from .backend import FaultyBackend, Token
from .callers import Caller
from .loops import SimulatedLoop
from .model import Books, Item, Request
from .schedule import (
    LOOPS,
    REBUILD_WINDOW_S,
    Arrive,
    Back,
    Close,
    Crash,
    Desert,
    Event,
    Fail,
    Leave,
    Lose,
    Memory,
    Point,
    Return,
    Schedule,
    Setup,
    Spin,
    Step,
    Stick,
    Tick,
    Turn,
    Watch,
    specs_of,
)

#: More steps than any schedule needs to come to rest.
_MOST_STEPS = 400


def run(setup: Setup, events: Sequence[Event], figures: Counter[str] | None = None) -> None:
    """Play a schedule; ``AssertionError`` if a guarantee was broken. Adds what happened to ``figures``."""
    Driver(Schedule(setup, events), Counter() if figures is None else figures).run()


@contextmanager
def quiet() -> Iterator[None]:
    """For many schedules: no log record is made, and what is left behind is looked for among what is new."""
    logger = logging.getLogger("retinue")
    was_disabled, logger.disabled = logger.disabled, True
    was_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:  # as by the tests' conftest, which leaves out what was imported
            gc.unfreeze()
        logger.disabled = was_disabled


class _Noting:
    """Notes what is raised within: it may be where the batcher takes it for a fault of ``fn``."""

    __slots__ = ("_note",)

    def __init__(self, note: Callable[[BaseException], None]) -> None:
        self._note = note

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._note(error)


class Driver:
    """One schedule on one batcher, whose alarm, observer, backend's hooks and next thread it is."""

    def __init__(self, schedule: Schedule, figures: Counter[str]) -> None:
        self.setup = schedule.setup
        self.figures = figures
        self.now_s = 1000.0
        self.books = Books(self.setup, self.clock)
        self.backend = FaultyBackend()
        self.loops = [SimulatedLoop(self.clock, self.on_tell) for _ in range(LOOPS)]
        self.callers: dict[int, Caller] = {}
        self.tokens: list[weakref.ref[Token]] = []
        self.numbers = itertools.count()
        self.events: Iterator[Event] = itertools.chain(schedule.events, self._afterwards())
        self.violation: BaseException | None = None
        self.noting = _Noting(self.note)
        self.next_stop: Point | None = None  # where a thread gets stuck next
        self.is_to_crash = False
        # Where threads are.
        self.alarms = 0
        self.is_asleep = self.is_holding = False
        self.holds_s = 0.0
        self.is_claiming = False  # after the choice of a batch and before its call
        self.is_stepping = False
        self.has_next_thread = False
        self.has_ended = False
        self.stuck = 0  # so many are, at some point
        self.telling = 0  # of those, so many are about to tell a loop
        # What was heard.
        self.releases = 0
        self.records: Counter[str] = Counter()  # of requests, by outcome
        self.life: Counter[str] = Counter()
        self.unrecorded = 0  # so many requests had no record when the thread crashed, and may never have
        self._make_batcher()

    def _make_batcher(self) -> None:
        setup = self.setup
        limits = Limits(setup.max_batch_cost, setup.max_batch_items, setup.buckets)
        self.batcher: ThreadedMicroBatcher[Any, Any] = ThreadedMicroBatcher(
            self.fn,
            max_batch_cost=limits.max_batch_cost,
            max_batch_items=limits.max_batch_items,
            buckets=limits.buckets,
        )
        # The one place that reaches into it: for a clock, an alarm and a next thread that are ours.
        self.actor = self.batcher._actor = Actor(
            self.fn,
            limits,
            on_start=self.on_start,
            on_stop=self.on_stop,
            max_wait_s=setup.max_wait_s,
            max_pending_cost=setup.max_pending_cost,
            recovery=Recovery(
                may_repeat=setup.isolate,
                release_memory=self.release_memory,
                max_rebuilds=setup.max_rebuilds,
                rebuild_window_s=REBUILD_WINDOW_S,
                forward_timeout_s=setup.forward_timeout_s,
            ),
            respawn=self.respawn,
            observer=self if setup.is_observed else None,
            clock=self.clock,
            alarm=self,  # type: ignore[arg-type]  # it has the three methods
        )
        self._step, self._hand_on = self.actor.step, self.actor.hand_on
        self.actor.step, self.actor.hand_on = self.step, self.hand_on  # type: ignore[method-assign]

    def run(self) -> None:
        """Play it all; raise the first violation."""
        assert self.actor.begin()
        self.has_next_thread = True
        try:
            while self.has_next_thread:
                self.has_next_thread = False
                self.actor.run()
                if self.has_next_thread:
                    self._play(until=Step)
            self.has_ended = True
            while self._play():
                pass
        except BaseException as error:
            self.note(error)
        if self.violation is not None:
            raise self.violation
        self._check_end()

    # ---- playing

    def _play(self, until: type[Event] | None = None) -> bool:
        """Perform the next event, or those before the next of that kind; False if there is none."""
        while self.violation is None:
            with self.noting:
                event = next(self.events, None)
                if event is None:
                    return False
                if type(event) is until:
                    return True
                _PERFORM[type(event)](self, event)
                self.figures["events"] += 1
                pending = self.actor.pending()
                self.books.check_pending(pending.items, pending.cost, pending.running_cost)
            if until is None:
                return True
        return False

    def _stop_at(self, point: Point) -> None:
        """A thread is there; if it gets stuck, play what happens until it is back."""
        if self.next_stop == point and not self.is_claiming:
            self.next_stop = None
            self.stuck += 1
            self.telling += point == "tell"
            self._play(until=Back)
            self.telling -= point == "tell"
            self.stuck -= 1

    def note(self, error: BaseException) -> None:
        """Keep the first violation."""
        if self.violation is None:
            self.violation = error

    # ---- the batcher's thread

    def clock(self) -> float:
        return self.now_s

    def put(self, _: None) -> None:
        """Somebody wakes the thread."""
        self.alarms += 1

    def get_nowait(self) -> None:
        """The thread looks whether it was woken."""
        if not self.alarms:
            raise queue.Empty
        self.alarms -= 1

    def get(self, timeout: float | None = None) -> None:
        """The thread sleeps."""
        until_s = None if timeout is None else self.now_s + timeout
        self.is_asleep, self.is_holding = True, timeout is not None
        self.holds_s = timeout or 0.0
        while not self.alarms and (until_s is None or self.now_s < until_s):
            with self.noting:
                self.books.nothing_again()
                self.books.check_asleep(None if until_s is None else until_s - self.now_s)
                assert self._play(), "asleep for ever"
        self.is_asleep = self.is_holding = False
        if not self.alarms:
            raise queue.Empty
        self.alarms -= 1

    def step(self) -> bool:
        """The thread steps, once the schedule says so."""
        with self.noting:
            assert self._play(until=Step), "at work for ever"
        closed = [caller.request for caller in self.callers.values() if caller.is_bare and caller.is_done]
        self.is_stepping = self.is_claiming = True
        try:
            stepped = self._step()
        finally:
            self.is_stepping = self.is_claiming = False
        self.figures["steps"] += stepped
        with self.noting:
            if not stepped:
                self.books.nothing_again()
            for request in closed:
                self.books.hear(request)
        return stepped

    def hand_on(self) -> bool:
        expected = self.books.hand_on()
        goes_on = self._hand_on()
        if expected is None:
            self.books.handed_on(goes_on, has_failed=self.actor.state is State.FAILED)
            return goes_on
        with self.noting:
            assert goes_on is expected, f"a lost backend was {'' if goes_on else 'not '}to be built again"
        return goes_on

    def respawn(self) -> None:
        self.has_next_thread = True

    def on_start(self) -> None:
        self._stop_at("start")
        if not self.backend.builds():
            self.books.lose()
            raise RuntimeError("no such device")
        with self.noting:
            self.books.started()

    def on_stop(self) -> None:
        with self.noting:
            self.books.stopped()
        self._stop_at("stop")

    def release_memory(self) -> None:
        self.releases += 1

    def fn(self, items: list[Token], target_bucket: int | None = None) -> Any:
        self.is_claiming = False
        with self.noting:
            self.books.begin_call([item.number for item in items], target_bucket)
        call = self.books.call
        assert call is not None
        self._stop_at("call")
        ending, error, is_transient = self.backend.ending(call)
        results = self.backend.results(call) if error is None else None
        with self.noting:
            self.books.end_call(ending, is_transient=is_transient)
        self.figures[f"calls {ending}"] += 1
        if error is not None:
            raise error
        return results

    # ---- its loops and its observer

    def on_tell(self) -> None:
        """A thread is about to call into an event loop."""
        if self.is_to_crash and self._is_after_plain_call():
            self.is_to_crash = False
            self.books.lose()
            ended = sum(request.outcome is not None for request in self.books.requests)
            self.unrecorded = max(self.unrecorded, ended - self.records.total())
            raise MemoryError
        self._stop_at("tell")

    def _is_after_plain_call(self) -> bool:
        """Whether this is a step that has nothing else to do than to tell how its call ended."""
        call = self.books.last
        is_plain = call is not None and not call.is_late and self.books.last_ending in ("ok", "failed")
        return is_plain and self.is_stepping and not self.is_claiming and not self.stuck

    def on_batch(self, record: BatchRecord) -> None:
        call = self.books.last
        assert call is not None
        with self.noting:
            expected = (len(call.items), call.cost, call.bucket, call.is_retry)
            assert (record.items, record.cost, record.bucket, record.is_retry) == expected, record
            assert record.outcome == ("late" if call.is_late else self.books.last_ending), record
        self._stop_at("record")

    def on_request(self, record: RequestRecord) -> None:
        self.records[record.outcome] += 1
        self._stop_at("record")

    def on_life(self, record: LifeRecord) -> None:
        self.life[record.event] += 1
        self._stop_at("record")

    # ---- what happens

    def _arrive(self, event: Arrive) -> None:
        loop = self.loops[event.loop]
        if not loop.is_free or event.number in self.callers:
            return
        request = Request(event.number)
        for index, spec in enumerate(specs_of(event.items)):
            item = Item(next(self.numbers), spec.key, spec.cost, spec.fault, request, index, self.now_s)
            request.items.append(item)
        tokens = [Token(item.number) for item in request.items]
        self.tokens += map(weakref.ref, tokens)
        costs = [item.cost for item in request.items]
        keys = [None if item.key == "a" else item.key for item in request.items]
        expected = self.books.expected_at_arrival(request)
        coroutine = self.batcher.submit(
            tokens, None if set(costs) == {1} else costs, None if set(keys) == {None} else keys
        )
        caller = Caller(request, loop, coroutine, bare=event.bare)
        became = type(caller.error).__name__ if caller.is_done else "accepted"
        assert became in expected, f"{event} became {became}, not {expected}: {caller.error!r}"
        self.figures[f"submits {became}"] += 1
        if became == "accepted":
            self.books.accept(request)
            self.callers[event.number] = caller
            if event.patience_s is not None:
                loop.at(self.now_s + event.patience_s, lambda: self._leave(caller))

    def _leave(self, caller: Caller) -> None:
        if not caller.is_done and not caller.loop.is_closed():
            self.books.leave(caller.request)
            caller.leave()

    def _perform_leave(self, event: Leave) -> None:
        caller = self.callers.get(event.number)
        if caller is not None and caller.loop.is_free:
            self._leave(caller)

    def _turn(self, event: Turn) -> None:
        loop = self.loops[event.loop]
        if loop.is_free:
            loop.turn()
            self._compare()

    def _spin(self, event: Spin) -> None:
        loop = self.loops[event.loop]
        if loop.is_free:
            while loop.turn():
                pass
            self._compare()
            for caller in self.callers.values():
                request = caller.request
                is_told = caller.is_done or caller.loop is not loop or request.outcome is None
                assert is_told or self.telling, f"{request} is {request.outcome}, and nobody told it"

    def _desert(self, event: Desert) -> None:
        loop = self.loops[event.loop]
        if loop.is_free:
            loop.close()

    def _compare(self) -> None:
        """Whoever has an outcome has the right one."""
        for caller in self.callers.values():
            if caller.is_done and not caller.is_compared:
                caller.is_compared = True
                if not caller.is_bare:  # else it is noticed with the next step
                    self.books.hear(caller.request)
                self.books.answered(caller.request, caller.outcome())

    def _tick(self, event: Tick) -> None:
        self.now_s += event.seconds

    def _watch(self, _: Watch) -> None:
        latest_s = self.books.watch()
        again_s = self.actor.watch()
        if latest_s is None:
            assert again_s is None, f"nothing to watch for, and yet again in {again_s} s"
        else:
            assert again_s is not None, "never to be watched again"
            assert 0 < again_s <= latest_s, f"to be watched again in {again_s} s, not {latest_s}"

    def _fail(self, event: Fail) -> None:
        self.backend.fail(event.calls, event.raises)

    def _return(self, event: Return) -> None:
        self.backend.return_instead(event.what)

    def _lose(self, event: Lose) -> None:
        self.backend.lose(event.failing_builds)

    def _memory(self, event: Memory) -> None:
        self.backend.have_memory(event.cost)

    def _stick(self, event: Stick) -> None:
        self.next_stop = event.point

    def _crash(self, _: Crash) -> None:
        self.is_to_crash = True

    def _close(self, event: Close) -> None:
        self.books.close(event.drain)
        self.batcher.shutdown(wait=False, drain=event.drain)

    def _nothing(self, _: Step | Back) -> None:
        """A step that the thread cannot take now, or nobody is stuck."""

    # ---- the end

    def _afterwards(self) -> Iterator[Event]:
        """All is well from now on: everybody is answered, new callers are served, and it can be closed."""
        self.next_stop = None
        while self.stuck:
            yield Back()
        self.is_to_crash = False
        self.backend.recover()
        yield from self._come_to_rest()
        if self.books.state == "open":
            probes = [Arrive(-loop, "a1 b1", loop) for loop in range(LOOPS)]
            yield from probes
            yield from self._come_to_rest()
            for probe in probes:
                caller = self.callers.get(probe.number)
                assert caller is None or caller.request.outcome == "ok", f"{probe} was not served"
        yield Close(drain=len(self.callers) % 2 == 0)
        yield from self._come_to_rest()

    def _come_to_rest(self) -> Iterator[Event]:
        for _ in range(_MOST_STEPS):
            yield Step()
            if self.is_holding:
                yield Tick(self.holds_s)
            elif self.is_asleep or self.has_ended:
                break
        else:
            raise AssertionError("it does not come to rest")
        yield from map(Spin, range(LOOPS))
        for request in self.books.requests:
            assert request.outcome is not None, f"{request} waits for ever"
        pending = self.actor.pending()
        assert (pending.items, pending.cost, pending.running_cost) == (0, 0, 0), pending

    def _check_end(self) -> None:
        """Everything was ended and recorded, and nothing is kept."""
        books = self.books
        assert self.actor.stopped.done(), "the thread has ended and does not say so"
        assert not books.is_up, "on_stop was not called"
        assert self.releases == books.endings["out_of_memory"], f"{self.releases} releases of memory"
        if self.setup.is_observed:
            self._check_records()
        for loop in self.loops:
            assert not loop.complaints, loop.complaints
            loop.close()
        errors = [caller.error for caller in self.callers.values() if caller.error is not None]
        assert len(set(map(id, errors))) == len(errors), "two callers share an error"
        kept = [*self.tokens, *self.backend.made]
        kept += [weakref.ref(error) for error in errors if isinstance(error, RetinueError)]
        for request in books.requests:
            self.figures[f"requests {request.outcome}"] += 1
        self.callers.clear()
        errors.clear()
        if any(reference() is not None for reference in kept):
            gc.collect()
        left = [reference() for reference in kept if reference() is not None]
        assert not left, f"still referenced: {left}"

    def _check_records(self) -> None:
        outcomes = Counter(request.outcome for request in self.books.requests)
        ok, left = outcomes["ok"], outcomes["left"]
        expected = Counter(ok=ok, failed=outcomes.total() - ok - left)
        missing = outcomes.total() - self.records.total()
        assert 0 <= missing <= self.unrecorded, f"{self.records}, not {expected}"
        # Whose caller has left may have had another outcome before anybody noticed.
        assert self.unrecorded or self.records >= expected, f"{self.records}, not {expected}"
        assert self.life == +self.books.life, f"{self.life}, not {self.books.life}"


_PERFORM: dict[type[Event], Callable[[Driver, Any], None]] = {
    Arrive: Driver._arrive,
    Leave: Driver._perform_leave,
    Turn: Driver._turn,
    Spin: Driver._spin,
    Desert: Driver._desert,
    Tick: Driver._tick,
    Step: Driver._nothing,
    Back: Driver._nothing,
    Watch: Driver._watch,
    Fail: Driver._fail,
    Return: Driver._return,
    Lose: Driver._lose,
    Memory: Driver._memory,
    Stick: Driver._stick,
    Crash: Driver._crash,
    Close: Driver._close,
}
