"""Guarantee 8: what is pending is bounded, and a refusal says when there will be room."""

from __future__ import annotations

import asyncio

import pytest

from retinue.batching.planner import Limits
from retinue.batching.request import Request
from retinue.errors import EncoderFailed, InvalidInput, Overloaded

from .support import ByHand, Clock, Echo, Gate, Watch, open_actor, settle, tags


async def test_pending_cost_never_exceeds_its_bound() -> None:
    hand = ByHand(Echo(), max_pending_cost=10)
    accepted = [hand.submit("a", costs=[6]), hand.submit("b", costs=[4])]
    await settle()
    refused = hand.submit("c", costs=[1])
    with pytest.raises(Overloaded, match=r"10 is pending and the request costs 1.*max_pending_cost=10"):
        await refused
    assert hand.batcher.pending().cost == 10
    await hand.run_dry()
    assert [tags(task.result()) for task in accepted] == [["a"], ["b"]]


async def test_items_without_costs_count_one_each() -> None:
    hand = ByHand(Echo(), max_pending_cost=3)
    hand.submit(1, 2)
    await settle()
    with pytest.raises(Overloaded):
        await hand.submit(3, 4)
    fits = hand.submit(5)
    await hand.run_dry()
    assert tags(fits.result()) == [5]


async def test_a_request_enters_whole_or_not_at_all() -> None:
    echo = Echo()
    hand = ByHand(echo, max_pending_cost=3)
    hand.submit(1, 2)
    await settle()
    refused = hand.submit(3, 4)
    await hand.run_dry()
    assert isinstance(refused.exception(), Overloaded)
    assert echo.calls == [[1, 2]]


async def test_what_runs_is_pending_until_it_is_answered() -> None:
    seen = []
    hand = ByHand(Echo(lambda: seen.append(hand.batcher.pending())), max_pending_cost=5)
    hand.submit(1, costs=[5])
    await hand.step()
    [during] = seen
    assert (during.items, during.cost, during.running_cost) == (0, 0, 5)
    assert hand.batcher.pending().running_cost == 0


async def test_a_running_call_leaves_no_room() -> None:
    gate = Gate()
    hand = ByHand(gate, max_pending_cost=5)
    first = hand.submit(1, costs=[5])
    await settle()
    stepping = asyncio.create_task(asyncio.to_thread(hand.actor.step))
    await gate.inside()
    with pytest.raises(Overloaded):
        await hand.submit(2)
    gate.open()
    await stepping
    await first
    second = hand.submit(2)
    await hand.run_dry()
    assert tags(second.result()) == [2]


@pytest.mark.parametrize("ending", ["served", "failed", "left"])
async def test_room_comes_back_however_a_request_ends(ending: str) -> None:
    echo = Echo()
    echo.faults = [ValueError("bad")] if ending == "failed" else []
    hand = ByHand(echo, max_pending_cost=4)
    first = hand.submit(1, costs=[4])
    await settle()
    if ending == "left":
        first.cancel()
    await hand.run_dry()
    await asyncio.wait({first})
    if ending == "failed":
        assert isinstance(first.exception(), EncoderFailed)
    second = hand.submit(2, costs=[4])
    await hand.run_dry()
    assert tags(second.result()) == [2]


async def test_what_could_never_be_admitted_names_the_setting_and_the_value_needed() -> None:
    hand = ByHand(Echo(), max_pending_cost=4)
    with pytest.raises(InvalidInput, match=r"costs 5.*max_pending_cost=4.*need max_pending_cost=5"):
        await hand.submit(1, 2, costs=[3, 2])


@pytest.mark.parametrize("bound", [0, -1, True, 1.5, "9"])
def test_a_bound_is_a_positive_int(bound: object) -> None:
    with pytest.raises(ValueError, match="max_pending_cost"):
        ByHand(Echo(), max_pending_cost=bound)


async def test_retry_after_follows_what_calls_were_measured_to_take() -> None:
    clock, loop = Clock(), asyncio.get_running_loop()
    takes_s = iter([2.0, 3.0])
    actor = open_actor(Echo(lambda: clock.tick(next(takes_s))), clock=clock, max_pending_cost=10)
    for cost in (4, 8):  # 1 s, and 0.25 s for each unit of cost
        actor.enqueue(loop, ["warm"], [cost])
        actor.step()
    actor.enqueue(loop, ["a"], [10])
    with pytest.raises(Overloaded) as caught:
        actor.enqueue(loop, ["b"], [6])
    assert caught.value.retry_after == pytest.approx(2.5)


async def test_what_is_pending_tells_how_long_whoever_comes_now_will_wait() -> None:
    clock, loop, watch = Clock(), asyncio.get_running_loop(), Watch()
    expected_s = []

    def run() -> None:
        clock.tick(0.5)
        expected_s.append(actor.pending().expected_wait_s)
        clock.tick(0.5 + 0.25 * sum(fn.calls[-1]))

    fn = Echo(run)
    actor = open_actor(fn, Limits(max_batch_cost=8), clock=clock, observer=watch)
    for cost in (4, 8):
        actor.enqueue(loop, [cost], [cost])
        actor.step()
    for _ in range(2):
        actor.enqueue(loop, [6], [6])
    assert actor.pending().expected_wait_s == pytest.approx(3.0 + 2.0)  # a full call, and one of a cost of 4
    actor.step()
    assert expected_s[-1] == pytest.approx(2.5 + 2.0)  # of one call what is left of it, and another
    actor.step()
    assert [record.expected_wait_s for record in watch.requests] == pytest.approx([0.0, 0.0, 0.0, 2.5])
    assert actor.pending().expected_wait_s == 0.0


async def test_pending_says_how_long_the_oldest_has_waited() -> None:
    clock, loop = Clock(), asyncio.get_running_loop()
    actor = open_actor(Echo(), clock=clock)
    assert actor.pending().oldest_wait_s is None
    actor.enqueue(loop, [1])
    clock.tick(3.0)
    actor.enqueue(loop, [2])
    pending = actor.pending()
    assert (pending.items, pending.cost, pending.oldest_wait_s) == (2, 2, 3.0)


async def test_pending_says_how_long_a_call_has_been_running() -> None:
    clock, seen = Clock(), []

    def look() -> None:
        clock.tick(1.5)
        seen.append(actor.pending().running_s)

    actor = open_actor(Echo(look), clock=clock)
    actor.enqueue(asyncio.get_running_loop(), [1])
    actor.step()
    assert seen == [1.5]
    assert actor.pending().running_s is None


async def test_a_caller_who_leaves_a_request_that_was_refused_ends_nothing() -> None:
    actor = open_actor(Echo(), max_pending_cost=1)
    loop = asyncio.get_running_loop()
    actor.enqueue(loop, ["first"])
    refused = Request.to_wake(loop.create_future())
    with pytest.raises(Overloaded):
        actor.enqueue(loop, ["second"], [1], [None], refused)
    actor.withdraw(refused)
    assert actor.pending().items == 1
