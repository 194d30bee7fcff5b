"""Any interleaving of callers, steps, faults and shutdown, against a model of the batcher's guarantees.

The actor is driven by hand and the event loop runs only when a rule says so; hence a caller may have been
cancelled, or answered, and not know of it yet.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from retinue.batching.planner import MAX_TIMES_PASSED
from retinue.errors import EncoderFailed, EncoderUnavailable

from .support import ByHand, Item, Seen

CAP = 10
works = st.lists(st.tuples(st.integers(1, CAP), st.sampled_from("ab")), min_size=1, max_size=4)


@dataclass(eq=False)
class Entry:
    """One item, by the model's books."""

    tag: int
    cost: int
    key: str
    caller: Caller
    times_passed: int = 0


@dataclass(eq=False)
class Caller:
    """One ``submit``, by the model's books."""

    task: asyncio.Task[list[Any]]
    entries: list[Entry] = field(default_factory=list)
    answered: int = 0
    has_arrived: bool = False
    outcome: str | None = None


class BatcherMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        logging.getLogger("retinue").disabled = True  # a log record would keep what it reports
        self.loop = asyncio.new_event_loop()
        self.callers: list[Caller] = []  # whose tasks are not done yet, as far as was looked
        self.waiting: list[Entry] = []
        self.watched: list[weakref.ref[Any]] = []
        self.is_open = True
        self.is_draining = False
        self.fails_next = False
        self.within: Callable[[], object] | None = None
        self.called = False
        self.violation: AssertionError | None = None
        self.tag = 0

    @initialize(cap=st.none() | st.just(CAP), max_items=st.none() | st.integers(1, 4))
    def begin(self, cap: int | None, max_items: int | None) -> None:
        self.cap, self.max_items = cap, max_items
        self.hand = ByHand(self.fn, max_batch_cost=cap, max_batch_items=max_items, may_repeat=False)

    # ---- what happens

    @rule(works=works)
    def submit(self, works: list[tuple[int, str]]) -> None:
        items = [Item(self.tag + index) for index in range(len(works))]
        self.watched += [weakref.ref(item) for item in items]
        costs, keys = [cost for cost, _ in works], [key for _, key in works]
        caller = Caller(self.loop.create_task(self.hand.batcher.submit(items, costs, keys)))
        for cost, key in works:
            caller.entries.append(Entry(self.tag, cost, key, caller))
            self.tag += 1
        self.callers.append(caller)

    @rule()
    def spin(self) -> None:
        """The event loop runs until it has nothing to do."""
        for caller in self.callers:
            if not caller.has_arrived:
                caller.has_arrived = True
                if caller.outcome is None and self.is_open:
                    self.waiting += caller.entries
                elif caller.outcome is None:
                    caller.outcome = "unavailable"
        for _ in range(5):
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()
        self.compare()

    @precondition(lambda self: self.callers)
    @rule(number=st.integers(0, 99))
    def cancel(self, number: int) -> None:
        """A caller leaves, and hears of it at the next spin."""
        caller = self.callers[number % len(self.callers)]
        caller.task.cancel()
        caller.outcome = "cancelled"
        self.forget(caller)

    @rule()
    def let_the_next_call_fail(self) -> None:
        self.fails_next = True

    @rule()
    def step(self) -> None:
        expected = bool(self.waiting)
        self.called = False
        assert self.hand.actor.step() is expected
        if self.violation is not None:
            raise self.violation
        assert self.called is expected

    @precondition(lambda self: self.callers and self.waiting)
    @rule(number=st.integers(0, 99))
    def step_and_cancel_within(self, number: int) -> None:
        self.within = lambda: self.cancel(number)
        self.step()

    @precondition(lambda self: self.waiting)
    @rule(drain=st.booleans())
    def step_and_close_within(self, drain: bool) -> None:
        self.within = lambda: self.close(drain)
        self.step()

    @precondition(lambda self: self.callers)
    @rule(drain=st.booleans())
    def close(self, drain: bool) -> None:
        self.hand.actor.close(drain=drain)
        self.is_open = False
        if not drain or not self.is_draining:
            self.is_draining = drain
        if not drain:
            for caller in {entry.caller for entry in self.waiting}:
                caller.outcome = "unavailable"
            self.waiting.clear()

    # ---- what must hold of a call

    def fn(self, items: list[Item]) -> list[Seen]:
        self.called = True
        try:
            batch = self.claimed([item.tag for item in items])
        except AssertionError as violation:
            self.violation = violation
            raise
        within, self.within = self.within, None
        if within is not None:
            within()
        if self.fails_next:
            self.fails_next = False
            for caller in {entry.caller for entry in batch}:
                if caller.outcome is None:
                    caller.outcome = "failed"
                    self.forget(caller)
            raise ValueError("told to")
        for caller in (entry.caller for entry in batch):
            caller.answered += 1
            if caller.outcome is None and caller.answered == len(caller.entries):
                caller.outcome = "ok"
        results = [Seen(item.tag) for item in items]
        self.watched += [weakref.ref(result) for result in results]
        return results

    def claimed(self, tags: list[object]) -> list[Entry]:
        """What is in the call: led by the oldest, in order, within the limits, no emptier than first come,
        first served would be, and overtaking nobody too often.
        """
        assert self.waiting
        lane = [entry for entry in self.waiting if entry.key == self.waiting[0].key]
        batch = [entry for entry in lane if entry.tag in tags]
        assert [entry.tag for entry in batch] == tags
        assert batch[0] is lane[0]
        assert self._fits(batch)
        fitting = max(count for count in range(len(lane) + 1) if self._fits(lane[:count]))
        assert _cost(batch) >= _cost(lane[:fitting])
        for entry in lane[: lane.index(batch[-1])]:
            if entry not in batch:
                entry.times_passed += 1
                assert entry.times_passed <= MAX_TIMES_PASSED
        self.waiting = [entry for entry in self.waiting if entry not in batch]
        return batch

    def _fits(self, entries: list[Entry]) -> bool:
        return (self.cap is None or _cost(entries) <= self.cap) and (
            self.max_items is None or len(entries) <= self.max_items
        )

    def forget(self, caller: Caller) -> None:
        self.waiting = [entry for entry in self.waiting if entry.caller is not caller]

    # ---- what must hold of the outcomes

    def compare(self) -> None:
        """Each caller has exactly the outcome of the books, and the others wait."""
        errors: list[BaseException] = []
        for caller in self.callers:
            assert caller.task.done() is (caller.outcome is not None), caller
            if caller.outcome is not None:
                assert self.outcome_of(caller.task) == caller.outcome
                if caller.outcome == "ok":
                    tags = [entry.tag for entry in caller.entries]
                    assert [result.tag for result in caller.task.result()] == tags
                elif caller.outcome != "cancelled":
                    errors += filter(None, [caller.task.exception()])
        assert len(set(map(id, errors))) == len(errors)  # each caller has its own
        self.callers = [caller for caller in self.callers if caller.outcome is None]

    def outcome_of(self, task: asyncio.Task[list[Any]]) -> str:
        if task.cancelled():
            return "cancelled"
        error = task.exception()
        if error is None:
            return "ok"
        assert error.__traceback__ is not None
        if isinstance(error, EncoderFailed):
            assert isinstance(error.__cause__, ValueError)
            return "failed"
        assert isinstance(error, EncoderUnavailable)
        return "unavailable"

    @invariant()
    def nothing_waits_once_closed(self) -> None:
        assert self.is_open or self.is_draining or not self.waiting

    def teardown(self) -> None:
        try:
            if hasattr(self, "hand"):
                self.end()
        finally:
            logging.getLogger("retinue").disabled = False
            self.loop.close()

    def end(self) -> None:
        """After a shutdown everybody has an answer, and nothing of them is left."""
        self.spin()
        self.hand.actor.close(drain=self.is_draining or self.is_open)
        self.is_open = False
        while self.waiting:
            self.step()
        self.spin()
        assert not self.callers
        gc.collect()
        assert [reference() for reference in self.watched if reference() is not None] == []


def _cost(entries: list[Entry]) -> int:
    return sum(entry.cost for entry in entries)


TestBatcher = BatcherMachine.TestCase
TestBatcher.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
