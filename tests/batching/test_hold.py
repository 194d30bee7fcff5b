"""How long a batch waits for company: the promises of ``retinue.batching.hold``, and of the actor that holds.

Here the actor has its thread, and a clock that tells when the thread looks at it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from retinue.batching.actor import Actor, State
from retinue.batching.hold import remaining_hold_s
from retinue.batching.planner import Limits
from retinue.batching.request import Request
from retinue.errors import EncoderUnavailable

from .support import SOON_S, Clock, Echo, Watch

HOUR_S = 3600.0


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


class Held:
    """An actor on its thread that holds for an hour, on a clock that stands still."""

    def __init__(self, limits: Limits) -> None:
        self.fn = Echo(lambda: self.called.release())
        self.watch = Watch()
        self.clock = Clock()
        self.called = threading.Semaphore(0)
        self._waited = 0
        self._looked = threading.Semaphore(0)
        self.loop = asyncio.new_event_loop()
        self.actor = Actor(
            self.fn, limits, max_wait_s=HOUR_S, observer=self.watch, clock=self._look_at_the_clock
        )
        self.actor.begin()
        self.thread = threading.Thread(target=self.actor.run)
        self.thread.start()
        self.actor.started.result(SOON_S)

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
