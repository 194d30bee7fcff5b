"""One batch at a time, driven by hand: the promises of ``retinue.batching.actor`` that need no thread."""

from __future__ import annotations

import asyncio
import builtins
import logging
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from retinue.batching.actor import Actor, Recovery, State
from retinue.batching.planner import Limits
from retinue.batching.records import BatchRecord, RequestRecord
from retinue.errors import EncoderFailed, EncoderUnavailable

from .support import ByHand, Clock, Echo, Item, Seen, Watch, dead, error_of, open_actor, settle, tags

# ---- order, limits, keys, buckets


async def test_results_come_in_item_order() -> None:
    hand = ByHand(Echo())
    caller = hand.submit("a", "b", "c")
    await hand.step()
    assert tags(await caller) == ["a", "b", "c"]


async def test_results_come_in_item_order_whatever_the_order_of_the_calls() -> None:
    fn = Echo()
    hand = ByHand(fn, max_batch_cost=10)
    caller = hand.submit(0, 1, 2, 3, costs=[6, 7, 4, 3], keys=["x", "x", "x", "y"])
    await hand.run_dry()
    assert fn.calls == [[0, 2], [1], [3]]
    assert tags(await caller) == [0, 1, 2, 3]


async def test_all_that_waits_goes_out_as_one_batch_and_each_caller_gets_its_own() -> None:
    fn = Echo()
    hand = ByHand(fn)
    callers = [hand.submit(*group) for group in ([0], [1, 2], [3])]
    await hand.step()
    assert fn.calls == [[0, 1, 2, 3]]
    assert [tags(await caller) for caller in callers] == [[0], [1, 2], [3]]


async def test_an_arrival_between_two_steps_is_in_the_very_next_call() -> None:
    fn = Echo()
    hand = ByHand(fn, max_batch_items=2)
    for number in range(3):
        hand.submit(number)
    await hand.step()
    hand.submit("late")
    await hand.step()
    assert fn.calls == [[0, 1], [2, "late"]]


async def test_a_late_small_item_does_not_wait_for_the_whole_round() -> None:
    fn = Echo()
    hand = ByHand(fn, max_batch_cost=10)
    hand.submit("a", "b", "c", costs=[8, 8, 8])
    await hand.step()
    late = hand.submit("late", costs=[2])
    await hand.step()
    assert fn.calls[1] == ["b", "late"]
    assert tags(await late) == ["late"]


async def test_every_call_keeps_the_caps() -> None:
    fn = Echo()
    hand = ByHand(fn, max_batch_cost=16, max_batch_items=12)
    callers = [hand.submit(*[1] * 40)]
    callers += [hand.submit(*[1] * 7) for _ in range(10)]
    callers += [hand.submit(*range(1, 17), costs=list(range(1, 17)))]
    await hand.run_dry()
    assert all(sum(call) <= 16 and len(call) <= 12 for call in fn.calls)
    assert [len(await caller) for caller in callers] == [40, *[7] * 10, 16]


async def test_no_call_mixes_keys_and_one_request_may_have_several() -> None:
    fn = Echo()
    hand = ByHand(fn)
    first = hand.submit("a1", "b1", "a2", keys=["a", "b", "a"])
    second = hand.submit("b2", "none", keys=["b", None])
    await hand.run_dry()
    assert fn.calls == [["a1", "a2"], ["b1", "b2"], ["none"]]
    assert tags(await first) == ["a1", "b1", "a2"]
    assert tags(await second) == ["b2", "none"]


async def test_no_key_is_the_key_none() -> None:
    fn = Echo()
    hand = ByHand(fn)
    hand.submit("without")
    hand.submit("with", keys=[None])
    await hand.step()
    assert fn.calls == [["without", "with"]]


async def test_with_buckets_fn_is_told_the_smallest_that_holds_the_batch() -> None:
    fn = Echo()
    hand = ByHand(fn, buckets=(2, 4, 8))
    for cost in (1, 2, 3, 5, 8):
        hand.submit("x", costs=[cost])
        await hand.step()
    assert fn.buckets == [2, 2, 4, 8, 8]


async def test_without_buckets_fn_is_called_with_the_items_alone() -> None:
    async def outcome() -> list[int]:
        hand = ByHand(lambda items: items)  # takes no target_bucket
        caller = hand.submit(1)
        await hand.step()
        return await caller

    assert await outcome() == [1]


async def test_with_nothing_waiting_a_step_does_nothing() -> None:
    fn = Echo()
    hand = ByHand(fn)
    assert not await hand.step()
    assert fn.calls == []


async def test_fn_may_do_with_its_list_what_it_likes() -> None:
    def consume(items: list[int]) -> list[int]:
        results = []
        while items:
            results.append(items.pop(0))
        return results

    hand = ByHand(consume)
    callers = [hand.submit(1, 2), hand.submit(3)]
    await hand.step()
    assert [await caller for caller in callers] == [[1, 2], [3]]


# ---- cancellation


async def test_an_item_whose_caller_left_never_reaches_fn() -> None:
    fn = Echo()
    hand = ByHand(fn, max_batch_cost=10)
    poison = hand.submit("poison", costs=[9])
    neighbour = hand.submit("good", costs=[2])
    await settle()
    poison.cancel()
    await settle()
    assert poison.cancelled()
    await hand.run_dry()
    assert fn.calls == [["good"]]
    assert tags(await neighbour) == ["good"]


async def test_nor_when_the_caller_has_not_yet_heard_of_its_cancellation() -> None:
    fn = Echo()
    hand = ByHand(fn, max_batch_items=2)
    poison = hand.submit("poison", "poison too")
    hand.submit("good")
    await settle()
    poison.cancel()  # 1. the task's future is cancelled; CancelledError is on its way
    hand.actor.step()  # 2. the actor thread claims
    assert fn.calls == [["good"]]
    with pytest.raises(asyncio.CancelledError):
        await poison  # 3. it arrives
    assert not await hand.step()


async def test_a_claimed_item_finishes_and_its_result_is_dropped() -> None:
    def leave() -> None:
        leaver.cancel()

    fn = Echo(leave)
    hand = ByHand(fn)
    leaver = hand.submit("left")
    neighbour = hand.submit("stayed")
    await hand.step()
    assert fn.calls == [["left", "stayed"]]
    assert leaver.cancelled()
    assert tags(await neighbour) == ["stayed"]


async def test_of_a_request_in_flight_the_items_still_waiting_never_reach_fn() -> None:
    fn = Echo()
    hand = ByHand(fn, max_batch_items=1)
    leaver = hand.submit("first", "second", "third")
    neighbour = hand.submit("good")
    await hand.step()
    leaver.cancel()
    await hand.run_dry()
    assert fn.calls == [["first"], ["good"]]
    assert leaver.cancelled()
    assert tags(await neighbour) == ["good"]


async def test_a_caller_that_leaves_between_completion_and_delivery_is_cancelled_and_hurts_nobody() -> None:
    hand = ByHand(Echo())
    leaver, neighbour = hand.submit("left"), hand.submit("stayed")
    await settle()
    hand.actor.step()  # completed, and the wake-up is on its way
    leaver.cancel()
    assert tags(await neighbour) == ["stayed"]
    assert leaver.cancelled()


async def test_a_caller_that_leaves_after_delivery_is_cancelled() -> None:
    hand = ByHand(Echo())
    leaver = hand.submit("left")
    await settle()
    hand.actor.step()
    await asyncio.sleep(0)  # the wake-up has run, the caller has not
    leaver.cancel()
    await settle()
    assert leaver.cancelled()


async def test_a_time_limit_of_the_caller_takes_the_item_with_it() -> None:
    fn = Echo()
    hand = ByHand(fn)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(hand.submit("late"), timeout=0)
    await settle()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(hand.submit("late"), timeout=0.001)
    assert not await hand.step()
    assert fn.calls == []


async def test_a_caller_that_is_closed_rather_than_cancelled_leaves_too() -> None:
    fn = Echo()
    hand = ByHand(fn)
    coroutine = hand.batcher.submit(["closed"])
    coroutine.send(None)  # runs up to its wait
    neighbour = hand.submit("good")
    await settle()
    coroutine.close()
    await hand.step()
    assert fn.calls == [["good"]]
    assert tags(await neighbour) == ["good"]


# ---- the result contract


def refused(returned: object, *parts: str) -> Any:
    return pytest.param(lambda items: returned, parts, id=f"{type(returned).__name__} {returned!r:.12}")


@pytest.mark.parametrize(
    ("fn", "parts"),
    [
        refused(None, "expected a list or tuple of 3", "got NoneType"),
        refused({0: "a", 1: "b", 2: "c"}, "expected a list or tuple of 3", "got dict"),
        refused({1, 2, 3}, "expected a list or tuple of 3", "got set"),
        refused("abc", "expected a list or tuple of 3", "got str"),
        refused(b"abc", "expected a list or tuple of 3", "got bytes"),
        refused(3, "expected a list or tuple of 3", "got int"),
        refused(np.zeros(()), "expected a list or tuple of 3", "got ndarray"),
        refused([], "expected 3", "got 0"),
        refused([1, 2], "expected 3", "got 2"),
        refused((1, 2, 3, 4), "expected 3", "got 4"),
        refused(np.zeros((2, 3)), "expected 3", "got 2"),
        pytest.param(
            lambda items: (item for item in items),
            ("expected a list or tuple of 3", "got generator"),
            id="generator",
        ),
        pytest.param(iter, ("expected a list or tuple of 3", "got list_iterator"), id="iterator"),
    ],
)
async def test_a_broken_contract_fails_every_caller_naming_expected_and_got(
    fn: Callable[[list[Any]], Any], parts: tuple[str, ...]
) -> None:
    broken = True
    hand = ByHand(lambda items: fn(items) if broken else items, may_repeat=False)
    callers = [hand.submit(1, 2), hand.submit(3)]
    await hand.step()
    errors = [await error_of(caller) for caller in callers]
    assert errors[0] is not errors[1]
    for error in errors:
        assert type(error) is EncoderFailed
        assert all(part in str(error) for part in parts)
        assert error.__cause__ is None
    broken = False
    after = hand.submit(4)
    await hand.step()
    assert await after == [4]


@pytest.mark.parametrize("container", [list, tuple])
async def test_lists_and_tuples_are_results_whatever_they_hold(container: Any) -> None:
    hand = ByHand(lambda items: container([None, ..., items]))
    caller = hand.submit(1, 2, 3)
    await hand.step()
    assert await caller == [None, ..., [1, 2, 3]]


async def test_an_array_is_split_along_its_first_axis() -> None:
    hand = ByHand(lambda items: np.stack([np.full((2, 4), item) for item in items]))
    first, second = hand.submit(1), hand.submit(2, 3)
    await hand.step()
    results = [*await first, *await second]
    assert [result.shape for result in results] == [(2, 4)] * 3
    assert [result[0, 0] for result in results] == [1, 2, 3]


@pytest.mark.parametrize("item", [np.zeros((2, 2)), {"pixels": np.ones(3)}], ids=["array", "dict of array"])
async def test_items_and_results_are_never_compared_hashed_or_tested(item: Any) -> None:
    hand = ByHand(lambda items: items, max_batch_items=2)
    callers = [hand.submit(item), hand.submit(item, item), hand.submit(item)]
    await settle()
    callers[2].cancel()
    await hand.run_dry()
    assert (await callers[0])[0] is item
    assert [result is item for result in await callers[1]] == [True, True]


async def test_an_array_of_items_is_a_request() -> None:
    hand = ByHand(lambda items: items)
    caller = asyncio.ensure_future(hand.batcher.submit(np.eye(2), np.array([1, 2]), np.array([7, 7])))  # type: ignore[arg-type]
    await hand.step()
    assert np.array_equal(await caller, np.eye(2))


# ---- what fn raises


class Shy(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Base(BaseException):
    """Neither an Exception nor one of the interpreter's."""


FAULTS = [
    ValueError("bad pixel"),
    StopIteration(1),
    StopAsyncIteration(),
    SystemExit(3),
    KeyboardInterrupt(),
    GeneratorExit(),
    asyncio.CancelledError("not yours"),
    MemoryError(),
    RecursionError(),
    EncoderUnavailable("not yours either"),
    Shy(),
    Base("own"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
async def test_whatever_fn_raises_each_caller_gets_an_error_of_its_own_with_the_cause(
    fault: BaseException,
) -> None:
    fn = Echo()
    fn.faults = [fault]
    hand = ByHand(fn, max_batch_items=2, may_repeat=False)
    callers = [hand.submit(number) for number in range(2)]
    behind = [hand.submit(number) for number in range(2, 5)]
    await hand.run_dry()
    errors = [await error_of(caller) for caller in callers]
    assert errors[0] is not errors[1]
    for error in errors:
        assert type(error) is EncoderFailed
        assert error.__cause__ is fault
        assert f"fn raised {type(fault).__name__}" in str(error)
    assert not any(caller.cancelled() for caller in callers)
    assert [tags(await caller) for caller in behind] == [[2], [3], [4]]


async def test_the_error_quotes_what_fn_said() -> None:
    fn = Echo()
    fn.faults = [ValueError("bad pixel"), Shy()]
    hand = ByHand(fn)
    texts = []
    for _ in range(2):
        caller = hand.submit(1)
        await hand.step()
        texts.append(str(await error_of(caller)))
    assert texts == [
        "item 1 of 1: fn raised ValueError: bad pixel",
        "item 1 of 1: fn raised Shy: (its text cannot be shown)",
    ]


async def test_a_failed_call_is_logged_once_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    fault = ValueError("bad pixel")
    fn = Echo()
    fn.faults = [fault]
    hand = ByHand(fn, may_repeat=False)
    callers = [hand.submit(number) for number in range(3)]
    await hand.step()
    for caller in callers:
        await error_of(caller)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("retinue", "ERROR")
    assert record.getMessage() == "a call with 3 items failed"
    assert record.exc_info is not None
    assert record.exc_info[1] is fault


async def test_a_request_fails_as_a_whole_and_its_waiting_items_are_spared() -> None:
    fn = Echo()
    hand = ByHand(fn, max_batch_items=1)
    request = hand.submit("good", "bad", "spared")
    await hand.step()
    fn.faults = [ValueError("bad pixel")]
    await hand.run_dry()
    assert fn.calls == [["good"], ["bad"]]
    assert isinstance(await error_of(request), EncoderFailed)


async def test_neighbours_of_one_failing_batch_do_not_see_each_others_notes_context_or_traceback() -> None:
    fn = Echo()
    fn.faults = [ValueError("bad pixel")]
    hand = ByHand(fn, may_repeat=False)
    callers = [hand.submit(number) for number in range(50)]
    await hand.step()
    errors = [await error_of(caller) for caller in callers]
    try:
        try:
            raise errors[0]
        except EncoderFailed as error:
            error.args = ("mine",)
            raise KeyError("context") from None
    except KeyError:
        pass
    assert len(set(map(id, errors))) == 50
    assert all(str(error) == "item 1 of 1: fn raised ValueError: bad pixel" for error in errors[1:])
    assert all(error.__context__ is None for error in errors)
    assert len({len(traceback.extract_tb(error.__traceback__)) for error in errors[1:]}) == 1


# ---- hygiene


async def test_after_success_nothing_of_a_request_stays_referenced() -> None:
    hand = ByHand(Echo(), max_batch_items=1, observer=Watch())
    items = [Item("a"), Item("b")]
    watched = [weakref.ref(item) for item in items]
    caller = hand.submit(*items, keys=["a", "b"])
    del items
    await hand.run_dry()
    results = await caller
    watched += [weakref.ref(result) for result in results]
    assert watched[0]() is None  # with no help from the collector
    del results, caller
    assert dead(*watched)


@pytest.mark.usefixtures("quiet")
async def test_a_caller_that_keeps_its_error_keeps_no_item_of_the_batch() -> None:
    class Fault(Exception):
        """One that a weak reference can follow."""

    def fn(items: list[Item]) -> list[Item]:
        def inner(one: Item) -> None:
            mine = [one]
            raise Fault(len(mine))

        try:
            inner(items[0])
        except Fault as error:
            raise Fault("outer") from error
        return items

    hand = ByHand(fn, may_repeat=False)
    items = [Item(number) for number in range(3)]
    watched = [weakref.ref(item) for item in items]
    callers = [hand.submit(item) for item in items]
    del items
    await hand.step()
    errors = [await error_of(caller) for caller in callers]
    del callers
    assert all(isinstance(error.__cause__, Fault) for error in errors)
    assert dead(*watched)
    assert errors[0].__cause__ is not None
    lines = traceback.extract_tb(errors[0].__cause__.__traceback__)
    assert lines[-1].name == "fn"  # the lines stay
    fault = weakref.ref(errors[0].__cause__)
    mine = [weakref.ref(error) for error in errors]
    del errors
    assert [reference() for reference in (fault, *mine)] == [None] * 4  # with no help from the collector


@pytest.mark.usefixtures("quiet")
@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with Python 3.11")
async def test_nor_through_the_parts_of_an_exception_group() -> None:
    group = vars(builtins)["ExceptionGroup"]

    def inner(items: list[Item]) -> None:
        mine = items[0]
        raise ValueError(mine.tag)

    def fn(items: list[Item]) -> None:
        faults = []
        try:
            inner(items)
        except ValueError as error:
            faults.append(error)
        raise group("several", faults)

    hand = ByHand(fn)
    item = Item()
    watched = weakref.ref(item)
    caller = hand.submit(item)
    del item
    await hand.step()
    error = await error_of(caller)
    del caller
    assert dead(watched)
    assert isinstance(error.__cause__, group)


@pytest.mark.usefixtures("quiet")
async def test_a_broken_contract_keeps_neither_items_nor_results() -> None:
    hand = ByHand(lambda items: [Seen(1), *items])
    item = Item()
    watched = weakref.ref(item)
    caller = hand.submit(item)
    del item
    await hand.step()
    error = await error_of(caller)
    del caller
    assert dead(watched)
    assert isinstance(error, EncoderFailed)


@pytest.mark.parametrize("claimed", [False, True])
async def test_after_a_cancellation_nothing_of_a_request_stays_referenced(claimed: bool) -> None:
    hand = ByHand(Echo(lambda: leaver.cancel()))
    item = Item()
    watched = weakref.ref(item)
    leaver = hand.submit(item)
    del item
    if claimed:
        await hand.step()
    else:
        await settle()
        leaver.cancel()
        await settle()
    assert leaver.cancelled()
    assert dead(watched)


async def test_the_traceback_of_a_cancellation_keeps_no_result() -> None:
    made: list[weakref.ref[Seen]] = []

    def fn(items: list[Any]) -> list[Seen]:
        results = [Seen(item) for item in items]
        made.extend(weakref.ref(result) for result in results)
        return results

    hand = ByHand(fn, max_batch_items=1)
    leaver = hand.submit("first", "second")
    await hand.step()
    leaver.cancel()
    with pytest.raises(asyncio.CancelledError) as cancelled:
        await leaver
    await hand.run_dry()
    assert dead(*made)
    assert cancelled.value.__traceback__ is not None


async def test_after_a_close_nothing_of_a_request_stays_referenced() -> None:
    hand = ByHand(Echo())
    item = Item()
    watched = weakref.ref(item)
    caller = hand.submit(item)
    del item
    await settle()
    hand.actor.close()
    error = await error_of(caller)
    assert isinstance(error, EncoderUnavailable)
    del caller
    assert dead(watched)


# ---- event loops


class CountingLoop(asyncio.SelectorEventLoop):
    """A loop that is not running and counts the calls into it from other threads."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.fails_at_call: int | None = None

    def call_soon_threadsafe(self, *args: Any, **options: Any) -> Any:  # type: ignore[override]  # any will do
        self.calls += 1
        if self.calls == self.fails_at_call:
            raise MemoryError
        return super().call_soon_threadsafe(*args, **options)

    def run_ready(self) -> None:
        self.call_soon(self.stop)
        self.run_forever()


@pytest.fixture
def loops() -> Iterator[list[CountingLoop]]:
    made = [CountingLoop() for _ in range(3)]
    yield made
    for loop in made:
        loop.close()


@pytest.mark.parametrize("fault", [None, ValueError("bad pixel")])
def test_a_batch_makes_one_call_into_each_loop(
    loops: list[CountingLoop], fault: BaseException | None
) -> None:
    fn = Echo()
    fn.faults = [fault] if fault else []
    actor = open_actor(fn, recovery=Recovery(may_repeat=False))
    requests = [actor.enqueue(loop, [0]) for _ in range(10) for loop in loops]
    actor.step()
    assert [loop.calls for loop in loops] == [1, 1, 1]
    assert not any(request.future.done() for request in requests)
    for loop in loops:
        loop.run_ready()
    assert all(request.future.done() for request in requests)


def test_a_close_makes_one_call_into_each_loop(loops: list[CountingLoop]) -> None:
    actor = open_actor(Echo())
    requests = [actor.enqueue(loop, [0]) for _ in range(10) for loop in loops]
    actor.close()
    assert [loop.calls for loop in loops] == [1, 1, 1]
    assert all(isinstance(request.error, EncoderUnavailable) for request in requests)
    assert len({id(request.error) for request in requests}) == 30


def test_a_request_in_several_batches_wakes_its_loop_once(loops: list[CountingLoop]) -> None:
    actor = open_actor(Echo(), Limits(max_batch_items=1))
    actor.enqueue(loops[0], [1, 2, 3])
    while actor.step():
        pass
    assert loops[0].calls == 1


@pytest.mark.parametrize("fault", [None, ValueError("bad pixel")])
def test_a_loop_that_was_closed_does_no_harm(loops: list[CountingLoop], fault: BaseException | None) -> None:
    fn = Echo()
    fn.faults = [fault] if fault else []
    actor = open_actor(fn, recovery=Recovery(may_repeat=False))
    requests = [actor.enqueue(loop, [0]) for loop in loops]
    loops[0].close()
    loops[1].close()
    actor.step()
    loops[2].run_ready()
    assert requests[2].future.done()
    after = actor.enqueue(loops[2], [1])
    actor.step()
    assert tags(after.results) == [1]


def test_a_close_with_a_closed_loop_tells_the_others(loops: list[CountingLoop]) -> None:
    actor = open_actor(Echo())
    requests = [actor.enqueue(loop, [0]) for loop in loops]
    loops[0].close()
    actor.close()
    loops[2].run_ready()
    assert requests[2].future.done()


# ---- crashes


class Crash(BaseException):
    """Not from fn: the machinery itself fails."""


@pytest.mark.usefixtures("quiet")
def test_a_crash_after_the_claim_answers_what_it_had_claimed(loops: list[CountingLoop]) -> None:
    def clock() -> float:
        if called:
            raise Crash("no time")
        return 0.0

    called = False
    fn, watch = Echo(), Watch()
    actor = open_actor(fn, Limits(max_batch_items=1), observer=watch, clock=clock)
    requests = [actor.enqueue(loops[0], [1]), actor.enqueue(loops[1], [2])]
    called = True
    with pytest.raises(Crash):  # in the end it has no time for its records either
        actor.run()
    assert fn.calls == []
    assert [type(request.error) for request in requests] == [EncoderUnavailable] * 2
    assert [loop.calls for loop in loops] == [1, 1, 0]
    assert actor.state is State.FAILED


@pytest.mark.usefixtures("quiet")
def test_a_crash_while_telling_tells_again(loops: list[CountingLoop]) -> None:
    loops[0].fails_at_call = 1
    actor = open_actor(Echo())
    requests = [actor.enqueue(loop, [number]) for number, loop in enumerate(loops)]
    actor.run()
    for loop in loops:
        loop.run_ready()
    assert all(request.future.done() for request in requests)
    assert [tags(request.results) for request in requests] == [[0], [1], [2]]  # they had been served


# ---- whole or not at all


class Thorn:
    """A key that cannot be compared with its like."""

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("incomparable")


async def test_a_request_whose_keys_cannot_be_compared_enters_not_at_all() -> None:
    fn = Echo()
    hand = ByHand(fn)
    with pytest.raises(RuntimeError, match="incomparable"):
        await hand.submit("a", "b", "c", keys=["a", Thorn(), Thorn()])
    good = hand.submit("good", keys=["a"])
    await hand.step()
    assert fn.calls == [["good"]]
    assert tags(await good) == ["good"]


# ---- life


def test_requests_are_taken_between_open_and_close_only() -> None:
    loop = asyncio.new_event_loop()
    actor = Actor(Echo(), Limits())
    steps: list[tuple[Callable[[], object], State, str]] = [
        (lambda: None, State.NEW, "before start"),
        (actor.begin, State.STARTING, "before start"),
        (actor.open, State.RUNNING, ""),
        (actor.close, State.CLOSED, "after shutdown"),
        (actor.open, State.CLOSED, "after shutdown"),
    ]
    for life, state, text in steps:
        life()
        assert actor.state is state
        if text:
            with pytest.raises(EncoderUnavailable, match=text):
                actor.enqueue(loop, [1])
            with pytest.raises(EncoderUnavailable, match=text):
                actor.check_open()
        else:
            actor.enqueue(loop, [1])
            actor.check_open()
    loop.close()


def test_only_the_first_may_run_it() -> None:
    actor = Actor(Echo(), Limits())
    assert [actor.begin(), actor.begin()] == [True, False]


async def test_a_closed_actor_fails_what_waits_and_runs_no_more() -> None:
    fn = Echo()
    hand = ByHand(fn, max_batch_items=1)
    half, waiting = hand.submit("one", "two"), hand.submit("three")
    await hand.step()
    hand.actor.close()
    errors = [await error_of(caller) for caller in (half, waiting)]
    assert all(type(error) is EncoderUnavailable for error in errors)
    assert errors[0] is not errors[1]
    assert not await hand.step()
    assert fn.calls == [["one"]]


async def test_a_drained_actor_serves_what_waits_and_takes_no_more() -> None:
    fn = Echo()
    hand = ByHand(fn, max_batch_items=1)
    callers = [hand.submit(number) for number in range(3)]
    await settle()
    hand.actor.close(drain=True)
    late = hand.submit("late")
    await hand.run_dry()
    assert [tags(await caller) for caller in callers] == [[0], [1], [2]]
    assert isinstance(await error_of(late), EncoderUnavailable)


async def test_a_drain_can_be_cut_short() -> None:
    fn = Echo()
    hand = ByHand(fn, max_batch_items=1)
    callers = [hand.submit(number) for number in range(2)]
    await settle()
    hand.actor.close(drain=True)
    await hand.step()
    hand.actor.close()
    assert tags(await callers[0]) == [0]
    assert isinstance(await error_of(callers[1]), EncoderUnavailable)
    hand.actor.close(drain=True)
    assert hand.actor.state is State.CLOSED


# ---- records


def test_a_batch_leaves_a_record(loops: list[CountingLoop]) -> None:
    watch, clock = Watch(), Clock()
    actor = open_actor(Echo(lambda: clock.tick(5)), Limits(buckets=(4, 8)), observer=watch, clock=clock)
    actor.enqueue(loops[0], ["a", "b", "other"], [1, 2, 1], ["k", "k", "l"])
    clock.tick(2)
    actor.enqueue(loops[0], ["c"], [3], ["k"])
    clock.tick(1)
    actor.step()
    assert watch.batches == [
        BatchRecord(
            id=1,
            items=3,
            requests=2,
            cost=6,
            key="k",
            bucket=8,
            oldest_wait_s=3.0,
            gap_s=3.0,
            duration_s=5.0,
            outcome="ok",
        )
    ]
    actor.step()
    assert watch.batches[1] == BatchRecord(
        id=2, items=1, requests=1, cost=1, key="l", bucket=4, oldest_wait_s=8.0, duration_s=5.0, outcome="ok"
    )


def test_a_failed_batch_leaves_a_record(loops: list[CountingLoop]) -> None:
    watch, clock = Watch(), Clock()
    fn = Echo(lambda: clock.tick(5))
    fn.faults = [ValueError("bad pixel")]
    actor = open_actor(fn, observer=watch, clock=clock)
    actor.enqueue(loops[0], ["a"])
    actor.step()
    assert watch.batches == [
        BatchRecord(
            id=1,
            items=1,
            requests=1,
            cost=1,
            key=None,
            bucket=None,
            oldest_wait_s=0.0,
            duration_s=5.0,
            outcome="failed",
        )
    ]
    assert [(record.outcome, record.batches) for record in watch.requests] == [("failed", (1,))]


def test_a_request_leaves_one_record_when_it_ends(loops: list[CountingLoop]) -> None:
    watch, clock = Watch(), Clock()
    actor = open_actor(Echo(lambda: clock.tick(5)), Limits(max_batch_items=2), observer=watch, clock=clock)
    actor.enqueue(loops[0], ["a"], [7])
    actor.enqueue(loops[0], ["b", "c"], [2, 3])
    clock.tick(1)
    actor.step()
    assert watch.requests == [
        RequestRecord(
            items=1,
            cost=7,
            ahead_items=0,
            ahead_cost=0,
            batches=(1,),
            wait_s=1.0,
            total_s=6.0,
            outcome="ok",
            arrived_s=1000.0,
            costs=(7,),
            keys=(None,),
        )
    ]
    actor.step()
    assert watch.requests[1:] == [
        RequestRecord(
            items=2,
            cost=5,
            ahead_items=1,
            ahead_cost=7,
            batches=(1, 2),
            wait_s=1.0,
            total_s=11.0,
            outcome="ok",
            expected_wait_s=1.0,  # it is unknown before the first call has ended
            arrived_s=1000.0,
            costs=(2, 3),
            keys=(None, None),
        )
    ]


def test_a_request_whose_caller_left_leaves_a_record_claimed_or_not(loops: list[CountingLoop]) -> None:
    def leave() -> None:
        clock.tick(5)
        actor.withdraw(claimed)

    watch, clock = Watch(), Clock()
    actor = open_actor(Echo(leave), observer=watch, clock=clock)
    waiting = actor.enqueue(loops[0], ["a"])
    claimed = actor.enqueue(loops[0], ["b"])
    clock.tick(1)
    actor.withdraw(waiting)
    actor.withdraw(waiting)
    actor.step()
    assert [(r.outcome, r.batches, r.wait_s, r.total_s) for r in watch.requests] == [
        ("left", (), None, 1.0),
        ("left", (1,), 1.0, 6.0),
    ]


async def test_leaving_in_any_other_way_leaves_the_same_record() -> None:
    watch = Watch()
    hand = ByHand(Echo(), observer=watch)
    undelivered = hand.submit("undelivered")
    closed = hand.batcher.submit(["closed"])
    await settle()
    closed.send(None)
    undelivered.cancel()
    closed.close()
    hand.actor.step()
    await settle()
    assert [(record.outcome, record.batches) for record in watch.requests] == [("left", ())] * 2
    assert watch.batches == []


def test_what_a_close_fails_leaves_a_record(loops: list[CountingLoop]) -> None:
    watch = Watch()
    actor = open_actor(Echo(), observer=watch)
    actor.enqueue(loops[0], ["a", "b"])
    actor.close()
    assert [(record.outcome, record.batches) for record in watch.requests] == [("failed", ())]


async def test_a_request_that_two_things_end_leaves_one_record() -> None:
    watch = Watch()
    hand = ByHand(Echo(lambda: hand.actor.close()), max_batch_items=1, observer=watch)
    caller = hand.submit("running", "waiting")
    await settle()
    hand.actor.step()  # 1. fn closes, which fails the request; 2. the running item completes
    caller.cancel()  # 3. its caller leaves
    await settle()
    assert caller.cancelled()
    assert [record.outcome for record in watch.requests] == ["failed"]


async def test_refused_requests_leave_no_record() -> None:
    watch = Watch()
    hand = ByHand(Echo(), observer=watch, max_batch_cost=1)
    await error_of(hand.submit("a", costs=[2]))
    assert await hand.submit() == []
    hand.actor.close()
    await error_of(hand.submit("a"))
    assert watch.requests == []


class Rude(Watch):
    def on_batch(self, record: BatchRecord) -> None:
        super().on_batch(record)
        raise ValueError("rude")

    def on_request(self, record: RequestRecord) -> None:
        super().on_request(record)
        raise ValueError("rude")


async def test_what_an_observer_raises_is_logged_and_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    rude = Rude()
    hand = ByHand(Echo(), observer=rude)
    served, left = hand.submit("a"), hand.submit("b")
    await settle()
    left.cancel()
    await hand.step()
    assert tags(await served) == ["a"]
    assert left.cancelled()
    assert (len(rude.batches), len(rude.requests)) == (1, 2)
    assert [record.getMessage() for record in caplog.records] == ["an observer raised"] * 3


async def test_an_observer_is_called_without_the_lock() -> None:
    class Asker(Watch):
        def on_batch(self, record: BatchRecord) -> None:
            states.append(hand.actor.state)

        on_request = on_batch  # type: ignore[assignment]

    states: list[State] = []
    hand = ByHand(Echo(), observer=Asker())
    served, left = hand.submit("a"), hand.submit("b")
    await settle()
    left.cancel()
    await hand.step()
    waiting = hand.submit("c")
    await settle()
    hand.actor.close()
    await asyncio.wait({served, left, waiting})
    assert states == [State.RUNNING] * 3 + [State.CLOSED]


# ---- logging


class BrokenHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise OSError("the disk is full")


async def test_a_logging_handler_that_raises_costs_no_answer() -> None:
    logger = logging.getLogger("retinue")
    fn = Echo()
    fn.faults = [ValueError("bad pixel")]
    hand = ByHand(fn, observer=Rude())
    handler = BrokenHandler()
    logger.addHandler(handler)
    try:
        failed = hand.submit("a")
        await hand.step()
        served = hand.submit("b")
        await hand.step()
    finally:
        logger.removeHandler(handler)
    assert str(await error_of(failed)) == "item 1 of 1: fn raised ValueError: bad pixel"
    assert tags(await served) == ["b"]
