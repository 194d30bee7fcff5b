"""``ThreadedMicroBatcher`` on its thread: life, requests from any loop, shutdown at any moment.

Events order everything; where a race is the point, the backend plays the other thread, in numbered steps.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from retinue.batching import BatchRecord, ThreadedMicroBatcher
from retinue.errors import EncoderFailed, EncoderUnavailable, InvalidInput, RetinueError

from .support import SOON_S, Batcher, Echo, Gate, Item, Watch, dead, error_of, settle, tags


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread not in before and _is_ours(thread)]
    for thread in left:
        thread.join(SOON_S)
    assert not any(thread.is_alive() for thread in left)


def _is_ours(thread: threading.Thread) -> bool:
    return not thread.name.startswith("asyncio_")  # those belong to a loop that is about to be closed


@pytest.fixture
async def gate() -> AsyncIterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


class Stage:
    """``on_start``, ``fn`` and ``on_stop`` that note who runs them, and wait or raise where told."""

    def __init__(self) -> None:
        self.acts: list[tuple[str, int]] = []
        self.starting = threading.Event()
        self.may_start = threading.Event()
        self.may_start.set()
        self.start_fault: BaseException | None = None
        self.stop_fault: BaseException | None = None
        self.stop_takes_s = 0.0

    def on_start(self) -> None:
        self.acts.append(("start", threading.get_ident()))
        self.starting.set()
        assert self.may_start.wait(SOON_S)
        if self.start_fault is not None:
            raise self.start_fault

    def fn(self, items: list[Any]) -> list[Any]:
        self.acts.append(("fn", threading.get_ident()))
        return items

    def on_stop(self) -> None:
        threading.Event().wait(self.stop_takes_s)
        self.acts.append(("stop", threading.get_ident()))
        if self.stop_fault is not None:
            raise self.stop_fault

    def batcher(self, **options: Any) -> Batcher:
        return ThreadedMicroBatcher(self.fn, on_start=self.on_start, on_stop=self.on_stop, **options)

    def names(self) -> list[str]:
        return [name for name, _ in self.acts]


def in_thread(target: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    """A started thread, and what comes out of it."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            target()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def named(name: str) -> threading.Thread:
    (thread,) = (thread for thread in threading.enumerate() if thread.name == name)
    return thread


class Crash(BaseException):
    """What an observer may not raise: it ends the machinery itself."""


class Crasher(Watch):
    """Lets the batching thread crash as it reports a batch."""

    def on_batch(self, record: BatchRecord) -> None:
        super().on_batch(record)
        raise Crash("boom")


# ---- options


@pytest.mark.parametrize("name", ["max_wait_s", "join_timeout_s"])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), True, 1e12])
def test_a_time_that_nobody_can_wait_is_refused(name: str, value: Any) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=f"{name} must be a number of seconds from 0 to"):
        ThreadedMicroBatcher(Echo(), **options)


@pytest.mark.parametrize(
    "options", [{"max_batch_cost": 1.5}, {"max_batch_items": True}, {"max_batch_cost": 2, "buckets": [1]}]
)
def test_limits_are_checked_before_anything_starts(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        ThreadedMicroBatcher(Echo(), **options)


def test_an_unknown_option_is_refused() -> None:
    options: dict[str, Any] = {"max_batch_size": 3}
    with pytest.raises(TypeError, match="max_batch_size"):
        ThreadedMicroBatcher(Echo(), **options)


async def test_the_longest_wait_that_is_taken_can_be_waited() -> None:
    options: dict[str, Any] = dict.fromkeys(("max_wait_s", "join_timeout_s"), threading.TIMEOUT_MAX)
    batcher: Batcher = ThreadedMicroBatcher(Echo(), max_batch_items=2, **options)
    await batcher.astart()
    held = asyncio.ensure_future(batcher.submit(["held"]))
    await settle()
    full = await batcher.submit(["full"])
    assert tags(full + await held) == ["full", "held"]
    batcher.shutdown()


# ---- life


async def test_all_of_the_backend_runs_on_one_thread_that_is_no_others() -> None:
    stage = Stage()
    async with stage.batcher() as batcher:
        for number in range(3):
            assert await batcher.submit([number]) == [number]
    assert stage.names() == ["start", "fn", "fn", "fn", "stop"]
    (thread,) = {ident for _, ident in stage.acts}
    assert thread != threading.get_ident()


def test_start_and_shutdown_are_synchronous() -> None:
    stage = Stage()
    batcher = stage.batcher()
    batcher.start()
    assert stage.names() == ["start"]
    assert asyncio.run(batcher.submit([1])) == [1]
    batcher.shutdown()
    assert stage.names() == ["start", "fn", "stop"]


def test_the_thread_bears_the_name_and_is_no_daemon() -> None:
    batcher: Batcher = ThreadedMicroBatcher(Echo(), name="eyes")
    batcher.start()
    assert not named("eyes").daemon
    batcher.shutdown()


async def test_astart_leaves_the_loop_alone_while_on_start_runs() -> None:
    stage = Stage()
    stage.may_start.clear()
    batcher = stage.batcher()
    starting = asyncio.ensure_future(batcher.astart())
    await asyncio.to_thread(stage.starting.wait, SOON_S)
    assert not starting.done()
    stage.may_start.set()
    await starting
    await batcher.aclose()


def start_sync(batcher: Batcher) -> None:
    batcher.start()


def start_async(batcher: Batcher) -> None:
    asyncio.run(batcher.astart())


either_start = pytest.mark.parametrize("start", [start_sync, start_async], ids=["start", "astart"])
Start = Callable[[Batcher], None]


@either_start
def test_a_second_start_is_refused_while_the_first_still_runs_and_later(start: Start) -> None:
    stage = Stage()
    stage.may_start.clear()
    batcher = stage.batcher()
    thread, errors = in_thread(batcher.start)
    assert stage.starting.wait(SOON_S)
    with pytest.raises(RuntimeError, match="called twice"):
        start(batcher)
    stage.may_start.set()
    thread.join()
    with pytest.raises(RuntimeError, match="called twice"):
        start(batcher)
    batcher.shutdown()
    with pytest.raises(RuntimeError, match="called twice"):
        start(batcher)
    assert errors == []
    assert stage.names() == ["start", "stop"]


@either_start
def test_an_error_of_on_start_comes_out_and_the_thread_is_gone(start: Start) -> None:
    stage = Stage()
    stage.start_fault = OSError("no such model")
    batcher = stage.batcher(name="eyes")
    with pytest.raises(OSError, match="no such model") as raised:
        start(batcher)
    assert raised.value is stage.start_fault
    assert "eyes" not in [thread.name for thread in threading.enumerate()]
    assert stage.names() == ["start"]  # on_stop only where on_start succeeded
    with pytest.raises(EncoderUnavailable, match="on_start failed"):
        asyncio.run(batcher.submit([1]))
    batcher.shutdown()
    assert stage.names() == ["start"]


@either_start
@pytest.mark.parametrize(
    "fault",
    [StopIteration(1), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit()],
    ids=lambda fault: type(fault).__name__,
)
def test_what_on_start_must_not_raise_comes_out_as_a_cause(start: Start, fault: BaseException) -> None:
    stage = Stage()
    stage.start_fault = fault
    batcher = stage.batcher(name="eyes")
    with pytest.raises(EncoderFailed, match=f"on_start raised {type(fault).__name__}") as raised:
        start(batcher)
    assert raised.value.__cause__ is fault
    assert "eyes" not in [thread.name for thread in threading.enumerate()]
    assert stage.names() == ["start"]


@either_start
def test_a_shutdown_during_on_start_ends_the_start_and_stops_what_was_started(start: Start) -> None:
    stage = Stage()
    stage.stop_takes_s = 0.05  # the start has not ended before
    stage.may_start.clear()
    batcher = stage.batcher()
    thread, errors = in_thread(lambda: start(batcher))
    assert stage.starting.wait(SOON_S)
    batcher.shutdown(wait=False)
    stage.may_start.set()
    thread.join()
    assert [(type(error), str(error)) for error in errors] == [
        (EncoderUnavailable, "shut down during start()")
    ]
    assert stage.names() == ["start", "stop"]


def test_a_drain_during_on_start_is_a_shutdown_too() -> None:
    stage = Stage()
    stage.may_start.clear()
    batcher = stage.batcher()
    thread, errors = in_thread(batcher.start)
    assert stage.starting.wait(SOON_S)
    batcher.shutdown(wait=False, drain=True)
    stage.may_start.set()
    thread.join()
    assert [str(error) for error in errors] == ["shut down during start()"]


async def test_an_astart_whose_caller_leaves_is_a_shutdown() -> None:
    stage = Stage()
    stage.may_start.clear()
    batcher = stage.batcher(name="eyes")
    starting = asyncio.ensure_future(batcher.astart())
    await asyncio.to_thread(stage.starting.wait, SOON_S)
    thread = named("eyes")
    starting.cancel()
    await asyncio.wait({starting})
    assert starting.cancelled()
    stage.may_start.set()
    await asyncio.to_thread(thread.join, SOON_S)
    assert stage.names() == ["start", "stop"]
    with pytest.raises(EncoderUnavailable, match="after shutdown"):
        await batcher.submit([1])


def test_an_interrupt_while_start_waits_is_a_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage()
    stage.may_start.clear()
    batcher = stage.batcher(name="eyes")
    threads: list[threading.Thread] = []

    def interrupted(timeout: float | None = None) -> None:
        threads.append(named("eyes"))
        stage.may_start.set()
        raise KeyboardInterrupt

    monkeypatch.setattr(batcher._actor.started, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        batcher.start()
    threads[0].join(SOON_S)
    assert stage.names() == ["start", "stop"]


def test_an_interrupt_just_as_the_thread_starts_is_a_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage()
    batcher = stage.batcher()
    start = threading.Thread.start
    threads: list[threading.Thread] = []

    def interrupted(thread: threading.Thread) -> None:
        start(thread)  # 1. the thread runs
        threads.append(thread)
        assert stage.starting.wait(SOON_S)
        raise KeyboardInterrupt  # 2. before anybody was told so

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            batcher.start()
    threads[0].join(SOON_S)
    assert stage.names() == ["start", "stop"]


@either_start
def test_a_thread_that_cannot_be_started_leaves_a_clear_refusal(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    batcher = Stage().batcher(join_timeout_s=SOON_S)

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            start(batcher)
    with pytest.raises(EncoderUnavailable, match="could not be started"):
        asyncio.run(batcher.submit([1]))
    batcher.shutdown()
    asyncio.run(batcher.aclose())


def test_an_error_of_on_stop_is_logged_and_never_raised(caplog: pytest.LogCaptureFixture) -> None:
    for fault in (OSError("cannot close"), SystemExit(3)):
        stage = Stage()
        stage.stop_fault = fault
        batcher = stage.batcher()
        batcher.start()
        batcher.shutdown()
        assert stage.names() == ["start", "stop"]
        (record,) = caplog.records
        assert record.getMessage() == "on_stop raised"
        assert record.exc_info is not None
        assert record.exc_info[1] is fault
        caplog.clear()


async def test_the_context_manager_stops_what_it_started_also_when_its_body_raises() -> None:
    stage = Stage()
    with pytest.raises(KeyError):
        async with stage.batcher():
            raise KeyError("body")
    assert stage.names() == ["start", "stop"]


# ---- requests that are refused


@pytest.mark.parametrize("items", [[], [1]], ids=["no items", "one item"])
async def test_each_state_in_which_nobody_serves_has_a_refusal_of_its_own(items: list[int]) -> None:
    batcher = Stage().batcher()
    with pytest.raises(EncoderUnavailable, match=r"^submit\(\) before start\(\)$"):
        await batcher.submit(items)
    await batcher.astart()
    assert await batcher.submit(items) == items
    await batcher.aclose()
    with pytest.raises(EncoderUnavailable, match=r"^submit\(\) after shutdown\(\)$"):
        await batcher.submit(items)


async def test_a_request_during_on_start_is_refused() -> None:
    stage = Stage()
    stage.may_start.clear()
    batcher = stage.batcher()
    starting = asyncio.ensure_future(batcher.astart())
    await asyncio.to_thread(stage.starting.wait, SOON_S)
    with pytest.raises(EncoderUnavailable, match="before start"):
        await batcher.submit([1])
    stage.may_start.set()
    await starting
    await batcher.aclose()


@pytest.mark.parametrize(
    ("costs", "keys", "text"),
    [
        ([1], None, "costs has 1 entries for 2 items"),
        ([1, 1, 1], None, "costs has 3 entries for 2 items"),
        ([], None, "costs has 0 entries for 2 items"),
        (None, ["a"], "keys has 1 entries for 2 items"),
        ([1, 0], None, "item 2 of 2: a cost must be a positive int, got 0"),
        ([6, 1], None, "item 1 of 2 costs 6, which exceeds max_batch_cost=5; it would need max_batch_cost=6"),
        (None, ["a", ["b"]], "item 2 of 2: a key must be hashable, got list"),
    ],
)
async def test_a_request_that_cannot_be_enters_not_at_all(costs: Any, keys: Any, text: str) -> None:
    fn = Echo()
    async with ThreadedMicroBatcher[Any, Any](fn, max_batch_cost=5) as batcher:
        with pytest.raises(InvalidInput) as refusal:
            await batcher.submit(["a", "b"], costs, keys)
        assert str(refusal.value) == text
        await batcher.submit(["good"])
    assert fn.calls == [["good"]]


async def test_costs_and_keys_may_be_arrays() -> None:
    async with ThreadedMicroBatcher[Any, Any](Echo(), max_batch_cost=5) as batcher:
        results = await batcher.submit(["a", "b"], np.array([2, 3]), np.array(["x", "y"]))  # type: ignore[arg-type]
    assert tags(results) == ["a", "b"]


async def test_what_the_caller_does_with_its_lists_afterwards_changes_nothing(gate: Gate) -> None:
    async with ThreadedMicroBatcher[Any, Any](gate, max_batch_cost=5) as batcher:
        first = asyncio.ensure_future(batcher.submit(["first"]))
        await gate.inside()
        items, costs, keys = ["a", "b"], [2, 3], ["x", "x"]
        request = asyncio.ensure_future(batcher.submit(items, costs, keys))
        await settle()
        items[0], costs[0], keys[0] = "z", 99, "y"
        gate.open()
        await first
        assert tags(await request) == ["a", "b"]
    assert gate.calls == [["first"], ["a", "b"]]


# ---- many requests, many loops


async def test_what_queues_behind_a_running_call_goes_out_as_one_batch(gate: Gate) -> None:
    async with ThreadedMicroBatcher[Any, Any](gate) as batcher:
        first = asyncio.ensure_future(batcher.submit(["first"]))
        await gate.inside()
        behind = [asyncio.ensure_future(batcher.submit([number])) for number in range(4)]
        await settle()
        gate.open()
        assert tags(await first) == ["first"]
        assert [tags(await caller) for caller in behind] == [[0], [1], [2], [3]]
    assert gate.calls == [["first"], [0, 1, 2, 3]]


async def test_a_lone_request_is_never_held() -> None:
    async with ThreadedMicroBatcher[Any, Any](Echo(), max_batch_items=64) as batcher:
        for number in range(20):  # each would hang, were it to wait for company
            assert tags(await batcher.submit([number])) == [number]


def test_loops_in_several_threads_share_batches_and_each_gets_its_own(gate: Gate) -> None:
    batcher: Batcher = ThreadedMicroBatcher(gate)
    batcher.start()
    answers: dict[int, list[Any]] = {}
    ready = threading.Barrier(5)

    def caller(number: int) -> None:
        async def main() -> None:
            requests = [asyncio.ensure_future(batcher.submit([(number, index)])) for index in range(10)]
            await settle()
            ready.wait(SOON_S)  # all have arrived
            answers[number] = [tags(await request) for request in requests]

        asyncio.run(main())

    first, first_errors = in_thread(lambda: asyncio.run(batcher.submit(["first"])))
    gate.wait_inside()
    callers = [in_thread(lambda number=number: caller(number)) for number in range(4)]  # type: ignore[misc]
    ready.wait(SOON_S)
    gate.open()
    for thread, errors in [*callers, (first, first_errors)]:
        thread.join()
        assert errors == []
    batcher.shutdown()
    assert [len(call) for call in gate.calls] == [1, 40]
    assert answers == {number: [[(number, index)] for index in range(10)] for number in range(4)}


def test_loops_come_and_go() -> None:
    batcher: Batcher = ThreadedMicroBatcher(Echo())
    batcher.start()
    for number in range(20):
        assert tags(asyncio.run(batcher.submit([number]))) == [number]
    batcher.shutdown()


def test_a_loop_that_goes_while_its_request_runs_hurts_nobody(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    batcher: Batcher = ThreadedMicroBatcher(gate)
    batcher.start()

    async def leave() -> None:
        asyncio.ensure_future(batcher.submit(["left"]))  # noqa: RUF006  # nobody will wait for it
        await gate.inside()

    asyncio.run(leave())
    stayer, errors = in_thread(lambda: asyncio.run(batcher.submit(["stayed"])))
    gate.open()
    stayer.join()
    batcher.shutdown()
    assert errors == []
    assert gate.calls == [["left"], ["stayed"]]
    assert caplog.records == []


def test_a_batcher_started_in_one_loop_serves_and_closes_in_others() -> None:
    stage = Stage()
    batcher = stage.batcher()
    asyncio.run(batcher.astart())
    assert asyncio.run(batcher.submit([1])) == [1]
    asyncio.run(batcher.aclose())
    assert stage.names() == ["start", "fn", "stop"]


# ---- shutdown


async def test_a_shutdown_lets_the_running_call_finish_fails_what_waits_and_calls_no_more(gate: Gate) -> None:
    batcher: Batcher = ThreadedMicroBatcher(gate)
    await batcher.astart()
    running = asyncio.ensure_future(batcher.submit(["running"]))
    await gate.inside()
    waiting = [asyncio.ensure_future(batcher.submit([number])) for number in range(3)]
    await settle()
    batcher.shutdown(wait=False)
    errors = [await error_of(caller) for caller in waiting]  # at once, the call still runs
    assert not running.done()
    gate.open()
    assert tags(await running) == ["running"]
    await batcher.aclose()
    assert gate.calls == [["running"]]
    assert {str(error) for error in errors} == {"shut down before the request was served"}
    assert {type(error) for error in errors} == {EncoderUnavailable}
    assert len(set(map(id, errors))) == 3


@pytest.mark.parametrize("way", ["shutdown", "aclose"])
async def test_a_drain_serves_what_waits_and_takes_no_more(gate: Gate, way: str) -> None:
    batcher: Batcher = ThreadedMicroBatcher(gate, max_batch_items=1)
    await batcher.astart()
    callers = [asyncio.ensure_future(batcher.submit([number])) for number in range(3)]
    await gate.inside()
    if way == "shutdown":
        batcher.shutdown(wait=False, drain=True)
        closing = asyncio.ensure_future(asyncio.to_thread(batcher.shutdown, drain=True))
    else:
        closing = asyncio.ensure_future(batcher.aclose(drain=True))
    await settle()
    with pytest.raises(EncoderUnavailable, match="after shutdown"):
        await batcher.submit(["late"])
    gate.open()
    await closing
    assert [tags(await caller) for caller in callers] == [[0], [1], [2]]
    assert gate.calls == [[0], [1], [2]]


async def test_aclose_leaves_the_loop_alone_while_a_call_runs(gate: Gate) -> None:
    ticks = 0

    async def heart() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    batcher: Batcher = ThreadedMicroBatcher(gate)
    await batcher.astart()
    running = asyncio.ensure_future(batcher.submit(["running"]))
    await gate.inside()
    heartbeat = asyncio.ensure_future(heart())
    closing = asyncio.ensure_future(batcher.aclose())
    await settle()
    before = ticks
    for _ in range(100):
        await asyncio.sleep(0)
    assert ticks >= before + 100
    assert not closing.done()
    gate.open()
    await closing
    heartbeat.cancel()
    assert tags(await running) == ["running"]


async def test_shutdown_from_fn_answers_its_own_batch_and_never_blocks() -> None:
    stage = Stage()

    def fn(items: list[Any]) -> list[Any]:
        batcher.shutdown()
        batcher.shutdown(drain=True)
        return items

    batcher: Batcher = ThreadedMicroBatcher(fn, on_stop=stage.on_stop, join_timeout_s=SOON_S)
    await batcher.astart()
    assert await batcher.submit([1]) == [1]
    await batcher.aclose()
    assert stage.names() == ["stop"]


def test_shutdown_from_on_start_and_on_stop_never_blocks() -> None:
    calls = []

    def hook() -> None:
        calls.append(1)
        batcher.shutdown()

    batcher: Batcher = ThreadedMicroBatcher(Echo(), on_start=hook, on_stop=hook, join_timeout_s=SOON_S)
    with pytest.raises(EncoderUnavailable, match="shut down during start"):
        batcher.start()
    assert calls == [1, 1]


async def test_shutdown_twice_or_more_stops_once() -> None:
    stage = Stage()
    batcher = stage.batcher()
    batcher.start()
    batcher.shutdown()
    batcher.shutdown()
    await batcher.aclose()
    await batcher.aclose(drain=True)
    assert stage.names() == ["start", "stop"]


def test_shutdown_from_several_threads_at_once_stops_once_and_all_see_it_stopped(gate: Gate) -> None:
    stage = Stage()
    batcher: Batcher = ThreadedMicroBatcher(gate, on_stop=stage.on_stop)
    batcher.start()
    caller, caller_errors = in_thread(lambda: asyncio.run(batcher.submit([1])))
    gate.wait_inside()
    stopped_before_return: list[bool] = []
    arrived = threading.Barrier(9)

    def close(number: int) -> None:
        arrived.wait(SOON_S)
        batcher.shutdown(drain=number % 2 == 0)
        stopped_before_return.append(stage.names() == ["stop"])

    closers = [in_thread(lambda number=number: close(number)) for number in range(8)]  # type: ignore[misc]
    arrived.wait(SOON_S)
    gate.open()
    for thread, errors in [*closers, (caller, caller_errors)]:
        thread.join()
        assert errors == []
    assert stopped_before_return == [True] * 8


async def test_before_start_a_shutdown_does_nothing() -> None:
    stage = Stage()
    batcher = stage.batcher(join_timeout_s=SOON_S)
    batcher.shutdown()
    await batcher.aclose(drain=True)
    await batcher.astart()
    assert await batcher.submit([1]) == [1]
    await batcher.aclose()
    assert stage.names() == ["start", "fn", "stop"]


async def test_shutdown_without_wait_returns_while_the_call_runs(gate: Gate) -> None:
    batcher: Batcher = ThreadedMicroBatcher(gate, join_timeout_s=3 * SOON_S)
    await batcher.astart()
    running = asyncio.ensure_future(batcher.submit(["running"]))
    await gate.inside()
    batcher.shutdown(wait=False)  # would never return
    gate.open()
    assert tags(await running) == ["running"]


@pytest.mark.parametrize("way", ["shutdown", "aclose"])
async def test_a_call_that_outlasts_the_grace_is_left_with_a_warning(
    gate: Gate, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    batcher: Batcher = ThreadedMicroBatcher(gate, name="eyes", join_timeout_s=0.01)
    await batcher.astart()
    thread = named("eyes")
    running = asyncio.ensure_future(batcher.submit(["running"]))
    await gate.inside()
    if way == "shutdown":
        batcher.shutdown()
    else:
        await batcher.aclose()
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == (
        "WARNING",
        "eyes: a call still runs 0.01 s after shutdown began (join_timeout_s); leaving it",
    )
    gate.open()
    assert tags(await running) == ["running"]
    thread.join(SOON_S)


async def test_an_aclose_whose_caller_leaves_goes_on_closing(gate: Gate) -> None:
    stage = Stage()
    batcher: Batcher = ThreadedMicroBatcher(gate, on_stop=stage.on_stop)
    await batcher.astart()
    running = asyncio.ensure_future(batcher.submit(["running"]))
    await gate.inside()
    closing = asyncio.ensure_future(batcher.aclose())
    await settle()
    closing.cancel()
    await asyncio.wait({closing})
    assert closing.cancelled()
    gate.open()
    assert tags(await running) == ["running"]
    await batcher.aclose()
    assert stage.names() == ["stop"]


async def test_a_failing_last_call_is_answered() -> None:
    def fn(items: list[Any]) -> list[Any]:
        batcher.shutdown()
        raise ValueError("last words")

    batcher: Batcher = ThreadedMicroBatcher(fn)
    await batcher.astart()
    with pytest.raises(EncoderFailed, match="last words"):
        await batcher.submit([1])
    await batcher.aclose()


# ---- crashes of the machinery itself


async def test_a_crash_answers_everybody_and_every_later_request(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage()
    crasher = Crasher()
    batcher: Batcher = ThreadedMicroBatcher(
        gate, max_batch_items=1, observer=crasher, on_stop=stage.on_stop, max_rebuilds=0
    )
    await batcher.astart()
    served = asyncio.ensure_future(batcher.submit(["served"]))
    await gate.inside()
    half = asyncio.ensure_future(batcher.submit(["half", "other half"]))
    waiting = asyncio.ensure_future(batcher.submit(["waiting"]))
    await settle()
    gate.open()
    errors = [await error_of(half), await error_of(waiting)]
    assert tags(await served) == ["served"]  # it had been answered before the crash
    for error in errors:
        assert type(error) is EncoderUnavailable
        assert str(error) == "the batching thread crashed: Crash: boom"
        assert isinstance(error.__cause__, Crash)
    assert errors[0] is not errors[1]
    for items in ([], ["late"]):
        with pytest.raises(EncoderUnavailable, match="after a failure: the batching thread crashed"):
            await batcher.submit(items)
    await batcher.aclose()
    assert stage.names() == ["stop"]
    assert gate.calls == [["served"]]
    assert [record.getMessage() for record in caplog.records] == ["the batching thread crashed"]
    assert sorted(record.outcome for record in crasher.requests) == ["failed", "failed"]


class Brittle:
    """A key that can be added, and then no longer be compared with its like."""

    broken = False

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        if Brittle.broken:
            raise RuntimeError("incomparable")
        return self is other


@pytest.mark.parametrize("end", ["crash", "shutdown"])
async def test_keys_that_cannot_be_compared_any_more_leave_nobody_waiting(
    gate: Gate, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Brittle, "broken", False)
    batcher: Batcher = ThreadedMicroBatcher(gate)
    await batcher.astart()
    running = asyncio.ensure_future(batcher.submit(["running"]))
    await gate.inside()
    a, b = Brittle(), Brittle()
    leaves = asyncio.ensure_future(batcher.submit(["b"], None, [b]))
    waiting = [
        asyncio.ensure_future(batcher.submit(["a"], None, [a])),
        asyncio.ensure_future(batcher.submit(["b too"], None, [b])),
    ]
    await settle()
    leaves.cancel()  # so that the oldest key is not the first that is met when it is looked up
    await settle()
    monkeypatch.setattr(Brittle, "broken", True)
    if end == "shutdown":
        batcher.shutdown(wait=False)
    gate.open()  # the next plan has to compare
    errors = [await error_of(caller) for caller in waiting]
    assert {type(error) for error in errors} == {EncoderUnavailable}
    assert tags(await running) == ["running"]
    await batcher.aclose()
    assert gate.calls == [["running"]]


@pytest.mark.usefixtures("quiet")
async def test_a_crash_keeps_no_item(gate: Gate) -> None:
    batcher: Batcher = ThreadedMicroBatcher(gate, observer=Crasher(), max_batch_items=1, max_rebuilds=0)
    await batcher.astart()
    items = [Item("claimed"), Item("waiting")]
    watched = [weakref.ref(item) for item in items]
    request = asyncio.ensure_future(batcher.submit(items))
    del items
    gate.open()
    error = await error_of(request)
    del request
    await batcher.aclose()
    assert isinstance(error.__cause__, Crash)
    assert dead(*watched)


# ---- hygiene


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("fault", [None, ValueError("bad pixel")])
async def test_an_idle_batcher_keeps_nothing_of_what_it_served(fault: BaseException | None) -> None:
    fn = Echo()
    async with ThreadedMicroBatcher[Any, Any](fn, max_batch_items=2) as batcher:
        items = [Item(number) for number in range(3)]
        watched: list[weakref.ref[Any]] = [weakref.ref(item) for item in items]
        request = asyncio.ensure_future(batcher.submit(items))
        del items
        if fault is None:
            watched += [weakref.ref(result) for result in await request]
        else:
            fn.faults = [fault]
            watched += [weakref.ref(await error_of(request))]
        del request
        await batcher.submit(["next"])  # the thread has left its last step
        assert dead(*watched)


def test_a_batcher_that_was_shut_down_is_collected_with_its_backend() -> None:
    class Owner:
        """As backends are: it owns the batcher, and the batcher calls it."""

        def __init__(self) -> None:
            self.batcher: Batcher = ThreadedMicroBatcher(self.fn, on_stop=self.stop)

        def fn(self, items: list[Any]) -> list[Any]:
            return items

        def stop(self) -> None:
            """Nothing."""

    owner = Owner()
    owner.batcher.start()
    assert asyncio.run(owner.batcher.submit([1])) == [1]
    owner.batcher.shutdown()
    watched = weakref.ref(owner)
    del owner
    assert dead(watched)


def test_no_task_or_future_complains_in_the_end(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    batcher: Batcher = ThreadedMicroBatcher(gate)
    batcher.start()

    async def main() -> None:
        running = asyncio.ensure_future(batcher.submit(["running"]))
        await gate.inside()
        waiting = asyncio.ensure_future(batcher.submit(["waiting"]))
        await settle()
        running.cancel()
        waiting.cancel()
        gate.faults = [ValueError("nobody hears")]
        gate.open()

    with caplog.at_level(logging.WARNING, "asyncio"):
        asyncio.run(main())
        batcher.shutdown()
        gc.collect()
    assert [record for record in caplog.records if record.name == "asyncio"] == []


# ---- races: the backend plays the other thread


async def test_cancelled_while_it_runs() -> None:
    def fn(items: list[Any]) -> list[Any]:
        calls.append(list(items))
        loop.call_soon_threadsafe(leaver.cancel)  # 2. its caller leaves, as far as it can see
        asyncio.run_coroutine_threadsafe(settle(), loop).result(SOON_S)  # 3. and has left
        return items  # 4.

    loop = asyncio.get_running_loop()
    calls: list[list[Any]] = []
    async with ThreadedMicroBatcher[Any, Any](fn, max_batch_items=1) as batcher:
        leaver = asyncio.ensure_future(batcher.submit(["one", "two", "three"]))
        await asyncio.wait({leaver}, timeout=SOON_S)  # 1. "one" is claimed
        assert leaver.cancelled()
        assert await batcher.submit(["next"]) == ["next"]
    assert calls == [["one"], ["next"]]


async def test_an_arrival_while_a_call_runs_is_in_the_next_call_before_older_waste() -> None:
    def fn(items: list[Any]) -> list[Any]:
        calls.append(list(items))
        if len(calls) == 1:
            asyncio.run_coroutine_threadsafe(arrive(), loop).result(SOON_S)  # 2. while 1. runs
        return items

    async def arrive() -> None:
        later.append(asyncio.ensure_future(batcher.submit(["late"])))
        await settle()

    loop = asyncio.get_running_loop()
    calls: list[list[Any]] = []
    later: list[asyncio.Future[Any]] = []
    async with ThreadedMicroBatcher[Any, Any](fn, max_batch_items=2) as batcher:
        await batcher.submit([1, 2, 3])  # 1. claims 1 and 2; 3. claims 3 and the late one
        await later[0]
    assert calls == [[1, 2], [3, "late"]]


async def test_shut_down_while_a_request_is_half_served() -> None:
    def fn(items: list[Any]) -> list[Any]:
        calls.append(list(items))
        batcher.shutdown()  # 2. "two" waits: the request fails
        return items  # 3. "one" completes: nothing happens

    calls: list[list[Any]] = []
    batcher: Batcher = ThreadedMicroBatcher(fn, max_batch_items=1)
    await batcher.astart()
    with pytest.raises(EncoderUnavailable, match="shut down before the request was served"):
        await batcher.submit(["one", "two"])  # 1. "one" is claimed
    await batcher.aclose()
    assert calls == [["one"]]


async def test_cancelled_and_shut_down_while_it_runs() -> None:
    def fn(items: list[Any]) -> list[Any]:
        batcher.shutdown()  # 2.
        loop.call_soon_threadsafe(leaver.cancel)  # 3.
        asyncio.run_coroutine_threadsafe(settle(), loop).result(SOON_S)
        raise ValueError("and it fails")  # 4.

    loop = asyncio.get_running_loop()
    batcher: Batcher = ThreadedMicroBatcher(fn, max_batch_items=1)
    await batcher.astart()
    leaver = asyncio.ensure_future(batcher.submit(["one", "two"]))  # 1.
    await asyncio.wait({leaver}, timeout=SOON_S)
    # It failed at 2; whether its caller hears of that or of its own cancellation is decided on the loop.
    assert leaver.cancelled() or isinstance(leaver.exception(), EncoderUnavailable)
    await batcher.aclose()


async def test_a_submit_between_the_last_look_and_the_sleep_is_not_lost() -> None:
    """As the thread leaves a step it looks at the queue: an arrival from its own last act must be seen."""

    class Arriver(Watch):
        def on_batch(self, record: BatchRecord) -> None:
            super().on_batch(record)
            if len(self.batches) < 100:
                loop.call_soon_threadsafe(arrive)

    def arrive() -> None:
        callers.append(asyncio.ensure_future(batcher.submit([len(callers)])))
        if len(callers) == 100:
            all_arrived.set()

    loop = asyncio.get_running_loop()
    callers: list[asyncio.Future[Any]] = []
    all_arrived = asyncio.Event()
    async with ThreadedMicroBatcher[Any, Any](Echo(), observer=Arriver()) as batcher:
        arrive()
        await asyncio.wait_for(all_arrived.wait(), SOON_S)
        answers = await asyncio.wait_for(asyncio.gather(*callers), SOON_S)
    assert [tags(answer) for answer in answers] == [[number] for number in range(100)]


class _Item:
    """Something that a weak reference can watch."""


@pytest.mark.parametrize("costs", [None, [0], [7]], ids=["not started", "no cost", "never fits"])
async def test_a_refusal_that_is_kept_keeps_no_item(costs: list[int] | None) -> None:
    batcher = ThreadedMicroBatcher[Any, Any](lambda items: items, max_batch_cost=5)
    item = _Item()
    watched = weakref.ref(item)
    with pytest.raises(RetinueError) as kept:
        await batcher.submit([item], costs)
    del item
    gc.collect()
    assert watched() is None, kept.value
