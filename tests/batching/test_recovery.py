"""A backend that is lost, a thread that dies, a call that does not end: who is answered, and what goes on."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from retinue.batching import LifeRecord, ThreadedMicroBatcher
from retinue.batching.actor import Actor, Recovery, State
from retinue.batching.planner import Limits
from retinue.errors import BackendLost, DeadlineExceeded, EncoderFailed, EncoderUnavailable

from .support import SOON_S, Batcher, ByHand, Clock, Echo, Gate, Watch, error_of, open_actor, settle, tags


class LifeWatch(Watch):
    """An observer that also hears of the backend, and lets a test wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.life: list[LifeRecord] = []
        self._heard = threading.Semaphore(0)

    def on_life(self, record: LifeRecord) -> None:
        self.life.append(record)
        self._heard.release()

    def events(self) -> list[str]:
        return [record.event for record in self.life]

    async def hears(self, event: str) -> None:
        while event not in self.events():
            assert await asyncio.to_thread(self._heard.acquire, timeout=SOON_S), f"never heard: {event}"


class Life:
    """What ``on_start`` and ``on_stop`` did, and on which threads."""

    def __init__(self) -> None:
        self.events: list[tuple[str, threading.Thread]] = []
        self.start_faults: list[BaseException | None] = []

    def start(self) -> None:
        fault = self.start_faults.pop(0) if self.start_faults else None
        self.events.append(("start" if fault is None else "no start", threading.current_thread()))
        if fault is not None:
            raise fault

    def stop(self) -> None:
        self.events.append(("stop", threading.current_thread()))

    def names(self) -> list[str]:
        return [name for name, _ in self.events]

    def threads(self) -> list[threading.Thread]:
        return [thread for _, thread in self.events]


def batcher(fn: Callable[..., Any], life: Life, **options: Any) -> Batcher:
    return ThreadedMicroBatcher(fn, on_start=life.start, on_stop=life.stop, **options)


# ---- a lost backend


async def test_a_lost_backend_is_closed_and_built_again_on_a_fresh_thread() -> None:
    fn, life, watch = Echo(), Life(), LifeWatch()
    fn.faults = [BackendLost("device gone")]
    async with batcher(fn, life, observer=watch) as batching:
        assert tags(await batching.submit(["in flight"])) == ["in flight"]  # run once more
        assert tags(await batching.submit(["after"])) == ["after"]
    assert life.names() == ["start", "stop", "start", "stop"]
    first, first_too, second, second_too = life.threads()
    assert first is first_too
    assert second is second_too
    assert first is not second
    assert watch.events() == ["lost", "rebuilt"]
    assert [record.outcome for record in watch.batches] == ["lost", "ok", "ok"]
    assert not any(thread.is_alive() for thread in life.threads())


async def test_what_was_not_dispatched_waits_and_is_served() -> None:
    gate, life = Gate(), Life()
    gate.faults = [BackendLost("device gone")]
    async with batcher(gate, life, max_batch_items=1) as batching:
        callers = [asyncio.ensure_future(batching.submit([number])) for number in range(3)]
        await gate.inside()
        gate.open()
        assert [tags(await caller) for caller in callers] == [[0], [1], [2]]
    assert gate.calls == [[0], [0], [1], [2]]


async def test_what_is_in_flight_at_a_second_loss_fails_and_the_rest_is_served() -> None:
    fn, life = Echo(), Life()
    fn.faults = [BackendLost("first"), BackendLost("second")]
    async with batcher(fn, life, max_batch_items=1) as batching:
        callers = [asyncio.ensure_future(batching.submit([tag])) for tag in ("killer", "next")]
        error = await error_of(callers[0])
        assert type(error) is EncoderFailed
        assert isinstance(error.__cause__, BackendLost)
        assert "lost with it in flight" in str(error)
        assert tags(await callers[1]) == ["next"]
    assert fn.calls == [["killer"], ["killer"], ["next"]]


async def test_a_backends_own_opinion_of_what_is_fatal_counts() -> None:
    fn, life = Echo(), Life()
    fn.faults = [RuntimeError("CUDA error: an illegal memory access was encountered")]
    async with batcher(fn, life, is_fatal=lambda error: "illegal" in str(error)) as batching:
        assert tags(await batching.submit([1])) == [1]
    assert life.names() == ["start", "stop", "start", "stop"]


async def test_a_build_that_fails_again_is_tried_again_on_another_thread() -> None:
    fn, life = Echo(), Life()
    fn.faults = [BackendLost("device gone")]
    life.start_faults = [None, RuntimeError("not yet"), None]
    async with batcher(fn, life) as batching:
        assert tags(await batching.submit([1])) == [1]
    assert life.names() == ["start", "stop", "no start", "start", "stop"]
    assert len(set(life.threads())) == 3


async def test_when_rebuilds_are_spent_all_are_refused_at_once_with_the_reason() -> None:
    gate, life, watch = Gate(), Life(), LifeWatch()
    gate.faults = [BackendLost(f"loss {number}") for number in range(10)]
    batching = batcher(gate, life, max_batch_items=1, max_rebuilds=2, observer=watch)
    await batching.astart()
    callers = [asyncio.ensure_future(batching.submit([number])) for number in range(4)]
    await gate.inside()
    gate.open()
    errors = [await error_of(caller) for caller in callers]
    assert [type(error) for error in errors] == [EncoderFailed] + [EncoderUnavailable] * 3
    assert "built again 2 times within rebuild_window_s=300" in str(errors[-1])
    with pytest.raises(EncoderUnavailable, match="after a failure: the backend was lost"):
        await batching.submit(["late"])
    await batching.aclose()
    assert life.names() == ["start", "stop"] * 3
    assert watch.events()[-1] == "failed"


async def test_max_rebuilds_0_builds_nothing_again() -> None:
    fn, life = Echo(), Life()
    fn.faults = [BackendLost("device gone")]
    async with batcher(fn, life, max_rebuilds=0) as batching:
        with pytest.raises(EncoderUnavailable, match="device gone"):
            await batching.submit([1])
    assert life.names() == ["start", "stop"]


async def test_may_repeat_false_fails_what_was_in_flight_and_builds_again() -> None:
    fn, life = Echo(), Life()
    fn.faults = [BackendLost("device gone")]
    async with batcher(fn, life, may_repeat=False) as batching:
        with pytest.raises(EncoderFailed, match="lost with it in flight"):
            await batching.submit([1])
        assert tags(await batching.submit([2])) == [2]
    assert fn.calls == [[1], [2]]


async def test_a_close_that_does_not_end_keeps_nobody_waiting() -> None:
    fn = Echo()
    fn.faults = [BackendLost("device gone")]
    closing = threading.Event()
    batching: Batcher = ThreadedMicroBatcher(
        fn, on_stop=lambda: closing.wait(SOON_S), join_timeout_s=0.05, name="slow-close"
    )
    await batching.astart()
    with pytest.raises(EncoderUnavailable, match=r"its close still runs 0\.05 s later"):
        await batching.submit([1])
    await batching.aclose()
    closing.set()
    for thread in threading.enumerate():
        if thread.name == "slow-close":
            await asyncio.to_thread(thread.join, SOON_S)


async def test_a_shutdown_while_the_backend_is_built_again_answers_everybody() -> None:
    building, go_on = threading.Event(), threading.Event()

    def start() -> None:
        if fn.calls:
            building.set()
            assert go_on.wait(SOON_S)

    fn = Echo()
    fn.faults = [BackendLost("device gone")]
    batching: Batcher = ThreadedMicroBatcher(fn, on_start=start)
    await batching.astart()
    caller = asyncio.ensure_future(batching.submit([1]))
    await asyncio.to_thread(building.wait, SOON_S)
    batching.shutdown(wait=False)
    assert isinstance(await error_of(caller), EncoderUnavailable)
    go_on.set()
    await batching.aclose()
    assert fn.calls == [[1]]


async def test_a_drain_serves_what_a_lost_backend_left() -> None:
    gate, life = Gate(), Life()
    gate.faults = [BackendLost("device gone")]
    batching = batcher(gate, life, max_batch_items=1)
    await batching.astart()
    callers = [asyncio.ensure_future(batching.submit([number])) for number in range(2)]
    await gate.inside()
    closing = asyncio.ensure_future(batching.aclose(drain=True))
    await settle()
    gate.open()
    assert [tags(await caller) for caller in callers] == [[0], [1]]
    await closing
    assert life.names() == ["start", "stop", "start", "stop"]


class Crash(BaseException):
    """Not from fn: the machinery itself fails."""


async def test_a_thread_that_dies_is_replaced_and_what_waits_is_served() -> None:
    class Crasher(Watch):
        def on_batch(self, record: Any) -> None:
            super().on_batch(record)
            if len(self.batches) == 1:
                raise Crash("boom")

    fn, life = Echo(), Life()
    async with batcher(fn, life, max_batch_items=1, observer=Crasher()) as batching:
        callers = [asyncio.ensure_future(batching.submit([number])) for number in range(3)]
        assert [tags(await caller) for caller in callers] == [[0], [1], [2]]
    assert fn.calls == [[0], [1], [2]]  # nothing twice
    assert life.names() == ["start", "stop", "start", "stop"]


async def test_rebuilds_are_counted_within_the_window_only() -> None:
    clock, fn, spawned = Clock(), Echo(), []
    actor = open_actor(
        fn,
        clock=clock,
        respawn=lambda: spawned.append(clock.now_s),
        recovery=Recovery(max_rebuilds=1, rebuild_window_s=60.0),
    )
    actor.started.set_result(None)
    loop = asyncio.get_running_loop()
    for seconds in (0.0, 61.0, 1.0):
        clock.tick(seconds)
        fn.faults = [BackendLost("again")]
        actor.enqueue(loop, [1])
        actor.step()
        if not actor.hand_on():
            break
        assert actor.build()
        while actor.step():
            pass
    assert len(spawned) == 2  # the third came too soon after the second
    assert actor.state is State.FAILED


# ---- a call that does not end


def stuck(clock: Clock, watch: LifeWatch, gate: Gate) -> tuple[Actor, threading.Thread]:
    """An actor, driven by hand, inside a call on another thread."""
    actor = open_actor(
        gate,
        Limits(max_batch_items=1),
        clock=clock,
        observer=watch,
        recovery=Recovery(forward_timeout_s=5.0),
    )
    loop = asyncio.get_running_loop()
    actor.enqueue(loop, ["late"])
    thread = threading.Thread(target=actor.step)
    thread.start()
    gate.wait_inside()
    return actor, thread


async def test_the_callers_of_a_late_call_get_deadline_exceeded_and_those_behind_it_are_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, watch, gate = Clock(), LifeWatch(), Gate()
    hand = ByHand(gate, clock, max_batch_items=1, forward_timeout_s=5.0, observer=watch)
    actor = hand.actor
    callers = [hand.submit(tag) for tag in ("late", "behind")]
    await settle()
    thread = threading.Thread(target=actor.step)
    thread.start()
    await gate.inside()
    assert actor.watch() == 5.0
    clock.tick(4.0)
    assert actor.watch() == 1.0
    clock.tick(1.0)
    assert actor.watch() == 5.0
    late, behind = [await error_of(caller) for caller in callers]
    assert type(late) is DeadlineExceeded
    assert str(late) == "item 1 of 1: fn has been running for more than forward_timeout_s=5"
    assert type(behind) is EncoderUnavailable
    with pytest.raises(EncoderUnavailable, match="a call has been running for more than"):
        await hand.batcher.submit(["later"])
    assert watch.events() == ["stuck"]
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "_park" in record.getMessage()  # where it is stuck

    gate.open()
    await asyncio.to_thread(thread.join, SOON_S)
    assert watch.events() == ["stuck", "back"]
    assert [record.outcome for record in watch.batches] == ["late"]
    after = hand.submit("after")
    await hand.step()
    assert tags(await after) == ["after"]
    assert gate.calls == [["late"], ["after"]]


async def test_a_late_call_that_then_fails_harms_nobody() -> None:
    clock, watch, gate = Clock(), LifeWatch(), Gate()
    gate.faults = [ValueError("too late to matter")]
    actor, thread = stuck(clock, watch, gate)
    clock.tick(5.0)
    actor.watch()
    gate.open()
    await asyncio.to_thread(thread.join, SOON_S)
    assert actor.state is State.RUNNING
    assert not actor.step()  # nothing is run again: its callers have their answer


async def test_a_shutdown_of_a_stuck_batcher_stays_a_shutdown() -> None:
    clock, watch, gate = Clock(), LifeWatch(), Gate()
    actor, thread = stuck(clock, watch, gate)
    clock.tick(5.0)
    actor.watch()
    actor.close()
    gate.open()
    await asyncio.to_thread(thread.join, SOON_S)
    assert actor.state is State.CLOSED


async def test_a_thread_that_dies_of_a_late_call_leaves_the_next_one_free() -> None:
    class Breaks(Clock):
        broken = False

        def __call__(self) -> float:
            if self.broken:
                self.broken = False
                raise Crash("no time")
            return super().__call__()

    clock, gate = Breaks(), Gate()
    recovery = Recovery(forward_timeout_s=5.0)
    actor = open_actor(gate, clock=clock, recovery=recovery, respawn=lambda: None)
    actor.enqueue(asyncio.get_running_loop(), ["late"])
    thread = threading.Thread(target=actor.run)
    thread.start()
    await gate.inside()
    clock.tick(5.0)
    actor.watch()
    assert actor.state is State.STUCK
    clock.broken = True
    gate.open()
    await asyncio.to_thread(thread.join, SOON_S)
    actor.check_open()
    assert actor.build()


async def test_a_watching_thread_finds_a_late_call_and_ends_with_the_batcher() -> None:
    gate, life = Gate(), Life()
    batching = batcher(gate, life, forward_timeout_s=0.05, name="watched")
    await batching.astart()
    with pytest.raises(DeadlineExceeded):
        await batching.submit(["late"])
    gate.open()
    await batching.aclose()
    for thread in threading.enumerate():
        if thread.name == "watched-watch":
            await asyncio.to_thread(thread.join, SOON_S)
            assert not thread.is_alive()


async def test_without_forward_timeout_s_nobody_watches() -> None:
    async with batcher(Echo(), Life(), name="unwatched"):
        assert "unwatched-watch" not in {thread.name for thread in threading.enumerate()}
    assert open_actor(Echo()).watch() is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_rebuilds": -1}, "max_rebuilds must be an int >= 0, got -1"),
        ({"max_rebuilds": 1.5}, "max_rebuilds must be an int >= 0"),
        ({"forward_timeout_s": 0}, "forward_timeout_s must be None or more than 0"),
        ({"forward_timeout_s": -1}, "forward_timeout_s must be a number of seconds"),
        ({"rebuild_window_s": float("nan")}, "rebuild_window_s must be a number of seconds"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ThreadedMicroBatcher(Echo(), **options)
