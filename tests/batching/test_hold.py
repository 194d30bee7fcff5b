"""How long a batch waits for company: the promises of ``retinue.batching.hold``, and of the actor that holds.

Here the actor has its thread, and a clock that tells when the thread looks at it.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from retinue.batching import BatchRecord
from retinue.batching.actor import Actor, State
from retinue.batching.hold import Curve, Hold, Returns, remaining_hold_s
from retinue.batching.planner import Limits
from retinue.batching.request import Request
from retinue.errors import EncoderUnavailable

from .support import SOON_S, Clock, Echo, Watch

HOUR_S = 3600.0


# ---- how long calls take


def test_a_curve_tells_what_a_call_takes_whatever_is_in_it_from_what_each_unit_adds() -> None:
    curve = Curve()
    for cost in (1, 64, 20):
        curve.note(cost, 2e-3 + 2e-4 * cost)
    assert curve.fixed_s == pytest.approx(2e-3)
    assert curve.per_cost_s == pytest.approx(2e-4)
    assert curve.seconds(100) == pytest.approx(22e-3)


def test_of_one_cost_alone_a_curve_takes_half_to_be_fixed() -> None:
    curve = Curve()
    for _ in range(9):
        curve.note(4, 8.0)
    assert (curve.fixed_s, curve.per_cost_s) == pytest.approx((4.0, 1.0))


@pytest.mark.parametrize(
    "calls",
    [[(1, 1.0), (2, 10.0)], [(1, 10.0), (2, 1.0)], [(cost, 1e-3 * cost**1.5) for cost in (8, 11, 9)]],
    ids=["steep", "falling", "rounded"],
)
def test_no_part_of_a_curve_is_below_nothing(calls: list[tuple[int, float]]) -> None:
    curve = Curve()
    for cost, duration_s in calls:
        curve.note(cost, duration_s)
    assert curve.fixed_s >= 0
    assert curve.per_cost_s >= 0


def learnt(*costs: int) -> Curve:
    """A curve of 100 calls of 1 s and 0.1 s for each unit of cost."""
    curve = Curve()
    for number in range(100):
        curve.note(costs[number % len(costs)], 1.0 + 0.1 * costs[number % len(costs)])
    return curve


def test_a_pause_of_the_machine_hardly_bends_a_curve() -> None:
    curve = learnt(2, 8, 32)
    curve.note(8, 1000.0)
    assert curve.seconds(8) == pytest.approx(1.8, rel=0.05)
    assert curve.seconds(32) == pytest.approx(4.2, rel=0.05)


def test_a_curve_follows_a_device_that_has_become_slow() -> None:
    curve = learnt(2, 8, 32)
    for number in range(200):
        cost = (2, 8, 32)[number % 3]
        curve.note(cost, 3 * (1.0 + 0.1 * cost))
    assert curve.seconds(8) == pytest.approx(5.4, rel=0.05)


def test_a_curve_keeps_its_shape_while_all_calls_cost_the_same() -> None:
    curve = learnt(2, 8, 32)
    for _ in range(1000):
        curve.note(8, 1.8)
    assert (curve.fixed_s, curve.per_cost_s) == pytest.approx((1.0, 0.1))


# ---- who comes back


def test_returns_are_the_share_of_what_was_answered_that_had_arrived_by_then() -> None:
    returns = Returns()
    for _ in range(5):
        returns.note(10, 1.0, [1e-5, 0.1, 0.1], [2, 3, 4])
    assert returns.until(1e-3) == pytest.approx(0.2)
    assert returns.until(0.2) == pytest.approx(0.9)
    assert returns.until(0.0) == 0
    by_degrees = [returns.until(0.06 + 0.001 * step) for step in range(100)]
    assert by_degrees == sorted(by_degrees)


def test_what_was_not_seen_to_its_end_says_nothing_of_who_comes_later() -> None:
    returns = Returns()
    returns.note(10, 2.0, [0.5], [10])
    for _ in range(20):
        returns.note(10, 0.01, [], [])
    assert returns.until(0.01) == 0
    assert returns.until(1.0) == pytest.approx(1.0)


# ---- whether a hold pays


class Callers:
    """A device of 2 ms and 0.2 ms for each item, whose callers come back soon after their answer."""

    def __init__(self, limits: Limits | None = None, key: object = "k") -> None:
        self.limits = limits or Limits(max_batch_cost=64)
        self.hold = Hold(self.limits)
        self.key = key
        self.now_s = 0.0

    def call(self, cost: int, *, succeeded: bool = True) -> None:
        duration_s = 2e-3 + 2e-4 * (self.limits.rung(cost) or cost)
        self.now_s += duration_s
        self.hold.called(self.key, cost, duration_s, self.now_s, succeeded=succeeded)

    def come(self, count: int, after_s: float) -> None:
        self.now_s += after_s
        for _ in range(count):
            self.hold.arrived(self.key, self.now_s, 1)

    def learn(self, *sizes: int, back_s: float = 1e-4) -> None:
        """Whole batches that come back after each answer, ten times each size."""
        for size in sizes * 10:
            self.call(size)
            self.come(size, back_s)
        self.call(sizes[-1])

    def held_s(self, waiting: int, most: float = 64) -> float:
        return self.hold.decide(self.key, waiting, most, self.now_s).seconds


def test_a_caller_who_is_alone_is_never_held() -> None:
    callers = Callers()
    for number in range(200):
        callers.call(1)
        callers.come(1, 1e-4 * (number % 7))
        assert callers.held_s(1) == 0


def test_a_request_waits_for_those_who_come_back_at_once() -> None:
    callers = Callers()
    callers.learn(8, 32)
    callers.come(1, 5e-5)
    held = callers.hold.decide("k", 1, 64, callers.now_s)
    assert 0 < held.seconds < 1e-3
    assert held.cost == pytest.approx(32, rel=0.05)
    callers.come(31, 5e-5)
    assert callers.held_s(32) == 0


def test_nobody_waits_for_those_who_come_back_later_than_a_call_takes_at_least() -> None:
    callers = Callers()
    callers.learn(8, 32, back_s=4e-3)
    callers.come(1, 1e-4)
    assert callers.held_s(1) == 0


def test_nobody_waits_for_those_who_do_not_come_back() -> None:
    callers = Callers()
    for size in (8, 32) * 10:
        callers.call(size)
        callers.come(1, 1.0)
    callers.call(32)
    callers.come(1, 1e-4)
    assert callers.held_s(1) == 0


def test_a_hold_never_lasts_longer_than_a_call_takes_at_least() -> None:
    callers = Callers()
    callers.learn(8, 32, back_s=1e-3)
    callers.come(1, 1e-4)
    began_s = callers.now_s
    while held_s := callers.held_s(1):
        callers.now_s += held_s
    assert 1e-3 < callers.now_s - began_s <= 2e-3


def test_a_full_batch_is_not_held() -> None:
    callers = Callers()
    callers.learn(8, 32)
    callers.come(8, 5e-5)
    assert callers.held_s(8) > 0
    assert callers.held_s(8, most=8) == 0


def test_nobody_is_held_after_a_call_that_failed() -> None:
    callers = Callers()
    callers.learn(8, 32)
    callers.call(32, succeeded=False)
    callers.come(1, 5e-5)
    assert callers.held_s(1) == 0


def test_what_is_known_of_one_key_holds_no_other() -> None:
    callers = Callers()
    callers.learn(8, 32)
    callers.key = "other"
    callers.come(1, 5e-5)
    assert callers.held_s(1) == 0
    callers.key = "k"
    callers.come(1, 0)
    assert callers.held_s(1) > 0


def test_company_that_would_need_the_next_larger_graph_is_not_waited_for() -> None:
    def held_s(limits: Limits) -> float:
        callers = Callers(limits)
        for size in (8, 18) * 10:
            callers.call(size)
            callers.come(size, 1e-3)
        callers.call(18)
        callers.come(15, 1e-4)
        return callers.held_s(15)

    assert held_s(Limits(max_batch_cost=64)) > 0
    assert held_s(Limits(buckets=(4, 8, 16, 64))) == 0


def test_keys_that_cannot_be_compared_are_forgotten_and_hold_nobody() -> None:
    class Key:
        def __hash__(self) -> int:
            return 1

        def __eq__(self, other: object) -> bool:
            raise ArithmeticError("no comparing")

    callers = Callers()
    for _ in range(3):
        callers.key = Key()
        callers.come(1, 1e-4)
        assert callers.held_s(1) == 0
        callers.call(1)
    callers.key = "k"
    callers.learn(8, 32)
    callers.come(1, 5e-5)
    assert callers.held_s(1) > 0


def test_many_keys_are_not_remembered_for_ever() -> None:
    callers = Callers()
    for key in range(10_000):
        callers.key = key
        callers.call(1)
    assert len(callers.hold._keys) <= 256


@pytest.mark.parametrize(
    ("cap", "cost", "seconds"),
    [(None, 100, 22e-3), (64, 64, 14.8e-3), (64, 128, 29.6e-3), (64, 74, 14.8e-3 + 4e-3)],
)
def test_what_waits_takes_full_calls_and_one_for_the_rest(cap: int | None, cost: int, seconds: float) -> None:
    callers = Callers(Limits(max_batch_cost=cap))
    assert callers.hold.seconds_for(cost) == 1.0  # nothing is known yet
    callers.learn(8, 32)
    assert callers.hold.seconds_for(cost) == pytest.approx(seconds)


# ---- the actor that holds


@pytest.mark.parametrize(
    ("oldest_wait_s", "max_wait_s", "full", "remaining_s"),
    [
        (0.0, 0.0, False, 0.0),
        (0.0, 2.0, False, 2.0),
        (0.5, 2.0, False, 1.5),
        (2.0, 2.0, False, 0.0),
        (9.0, 2.0, False, 0.0),
        (0.0, 2.0, True, 0.0),
    ],
)
def test_a_hold_by_example(oldest_wait_s: float, max_wait_s: float, full: bool, remaining_s: float) -> None:
    held_s = remaining_hold_s(oldest_wait_s=oldest_wait_s, max_wait_s=max_wait_s, full=full)
    assert held_s == remaining_s


class Ended(Watch):
    """A watch that tells when a call has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = threading.Semaphore(0)

    def on_batch(self, record: BatchRecord) -> None:
        super().on_batch(record)
        self.calls.release()


class Held:
    """An actor on its thread that holds for an hour, on a clock that moves only while it calls."""

    def __init__(
        self, limits: Limits, *, max_wait_s: float | None = HOUR_S, takes_s: tuple[float, float] = (0, 0)
    ) -> None:
        self.fn = Echo(self._call)
        self._takes_s = takes_s
        self.watch = Ended()
        self.clock = Clock()
        self.called = threading.Semaphore(0)
        self._waited = 0
        self._looked = threading.Semaphore(0)
        self.loop = asyncio.new_event_loop()
        self.actor = Actor(
            self.fn, limits, max_wait_s=max_wait_s, observer=self.watch, clock=self._look_at_the_clock
        )
        self.actor.begin()
        self.thread = threading.Thread(target=self.actor.run)
        self.thread.start()
        self.actor.started.result(SOON_S)

    def _call(self) -> None:
        fixed_s, per_item_s = self._takes_s
        self.clock.tick(fixed_s + per_item_s * len(self.fn.calls[-1]))
        self.called.release()

    def _look_at_the_clock(self) -> float:
        if threading.current_thread() is self.thread:
            self._looked.release()
        return self.clock()

    def arrive(self, item: object, cost: int = 1, key: object = None) -> Request:
        return self.actor.enqueue(self.loop, [item], [cost], [key])

    def wait_until_it_holds(self) -> None:
        """Until the thread has looked how long to hold; it then sleeps, or sees whatever came since."""
        assert self._looked.acquire(timeout=SOON_S)

    def wait_for_call(self) -> list[Any]:
        """The next call that nobody waited for yet."""
        assert self.called.acquire(timeout=SOON_S)
        self._waited += 1
        return self.fn.calls[self._waited - 1]

    def wait_until_it_has_ended(self) -> None:
        """Until one more call has."""
        assert self.watch.calls.acquire(timeout=SOON_S)

    def end(self) -> None:
        self.actor.close()
        self.actor.stopped.result(SOON_S)
        self.thread.join()
        self.loop.close()


@pytest.fixture(params=[Limits(max_batch_items=3), Limits(max_batch_cost=3)], ids=["items", "cost"])
def held(request: pytest.FixtureRequest) -> Iterator[Held]:
    held = Held(request.param)
    yield held
    held.end()


def test_a_batch_is_held_until_it_is_full(held: Held) -> None:
    held.arrive("a")
    held.wait_until_it_holds()
    held.arrive("b")
    held.arrive("c")
    assert held.wait_for_call() == ["a", "b", "c"]


def test_a_batch_that_is_full_at_once_is_not_held(held: Held) -> None:
    held.actor.enqueue(held.loop, ["a", "b", "c"])
    assert held.wait_for_call() == ["a", "b", "c"]


def test_arrivals_of_another_key_do_not_fill_it(held: Held) -> None:
    held.arrive("a", key="k")
    held.wait_until_it_holds()
    for item in ("x", "y", "z"):
        held.arrive(item, key="other")
    held.arrive("b", key="k")
    held.arrive("c", key="k")
    assert held.wait_for_call() == ["a", "b", "c"]
    assert held.wait_for_call() == ["x", "y", "z"]


def test_a_drain_ends_the_hold(held: Held) -> None:
    request = held.arrive("a")
    held.wait_until_it_holds()
    held.actor.close(drain=True)
    assert held.wait_for_call() == ["a"]
    held.actor.stopped.result(SOON_S)
    assert request.error is None
    assert held.actor.state is State.CLOSED


def test_a_close_ends_the_hold_and_fails_what_it_held(held: Held) -> None:
    request = held.arrive("a")
    held.wait_until_it_holds()
    held.actor.close()
    held.actor.stopped.result(SOON_S)
    assert isinstance(request.error, EncoderUnavailable)
    assert held.fn.calls == []


def test_what_leaves_during_the_hold_never_reaches_fn(held: Held) -> None:
    leaver = held.arrive("left")
    held.wait_until_it_holds()
    held.actor.withdraw(leaver)
    for item in ("a", "b", "c"):
        held.arrive(item)
    assert held.wait_for_call() == ["a", "b", "c"]


def test_what_waited_long_enough_while_the_thread_was_busy_is_not_held(held: Held) -> None:
    def be_slow() -> None:
        if len(held.fn.calls) == 1:
            held.arrive("late")
            held.clock.tick(HOUR_S)
        held.called.release()

    held.fn.then = be_slow
    held.actor.enqueue(held.loop, ["a", "b", "c"])
    held.wait_for_call()
    assert held.wait_for_call() == ["late"]


def test_a_hold_ends_when_its_time_is_up() -> None:
    watch = Watch()
    fn = Echo(lambda: called.set())
    called = threading.Event()
    actor = Actor(fn, Limits(), max_wait_s=0.05, observer=watch)
    actor.begin()
    thread = threading.Thread(target=actor.run)
    thread.start()
    actor.started.result(SOON_S)
    loop = asyncio.new_event_loop()
    actor.enqueue(loop, ["a"])
    assert called.wait(SOON_S)
    actor.close()
    thread.join()
    loop.close()
    assert fn.calls == [["a"]]
    assert watch.batches[0].oldest_wait_s >= 0.05


@pytest.fixture
def measured() -> Iterator[Held]:
    """Holds as long as it has measured to pay: one or two callers have come back 0.1 s after each answer."""
    held = Held(Limits(max_batch_items=8), max_wait_s=None, takes_s=(1.0, 0.01))
    for size in (1,) * 5 + (2,) * 5:
        held.actor.enqueue(held.loop, [*range(size)])
        assert held.wait_for_call() == [*range(size)]
        held.wait_until_it_has_ended()
        held.clock.tick(0.1)
    while held._looked.acquire(blocking=False):
        pass
    yield held
    held.end()


def test_who_came_back_first_is_held_until_the_others_are_there(measured: Held) -> None:
    measured.arrive("a")
    measured.wait_until_it_holds()
    measured.clock.tick(0.01)
    measured.arrive("b")
    assert measured.wait_for_call() == ["a", "b"]
    measured.wait_until_it_has_ended()
    assert measured.watch.batches[-1].held_s == pytest.approx(0.01)
    assert measured.watch.batches[-1].gap_s == pytest.approx(0.0)


def test_a_hold_for_others_ends_when_they_are_not_expected_any_more(measured: Held) -> None:
    measured.arrive("a")
    measured.wait_until_it_holds()
    measured.clock.tick(1.0)
    assert measured.wait_for_call() == ["a"]


def test_a_drain_ends_a_hold_for_others(measured: Held) -> None:
    measured.arrive("a")
    measured.wait_until_it_holds()
    measured.actor.close(drain=True)
    assert measured.wait_for_call() == ["a"]
    measured.actor.stopped.result(SOON_S)


def test_a_hold_begins_only_once_the_alarm_was_found_silent() -> None:
    """Without that look ``SimpleQueue.get`` may sleep for ever, up to CPython 3.12."""
    clock, heard = Clock(), []

    class Alarm(queue.SimpleQueue[None]):
        def get_nowait(self) -> None:
            heard.append("looked")
            raise queue.Empty

        def get(self, block: bool = True, timeout: float | None = None) -> None:
            heard.append(f"slept {timeout} s")
            clock.tick(timeout or 0.0)
            raise queue.Empty

    actor = Actor(Echo(), Limits(), max_wait_s=2.0, clock=clock, alarm=Alarm())
    actor.begin()
    actor.open()
    loop = asyncio.new_event_loop()
    actor.enqueue(loop, ["a"])
    assert actor._wait_for_work()
    loop.close()
    assert heard == ["looked", "slept 2.0 s"]
