"""What users of NVIDIA Dynamo's custom-encoder path rely on, and what hurts them there, in our own words.

Here stands what the other files do not say: the same promises seen from outside, at its names and defaults.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from retinue.batching import ThreadedMicroBatcher
from retinue.errors import EncoderFailed, InvalidInput

from .support import SOON_S, Batcher, Echo, Gate, error_of, settle, tags


@asynccontextmanager
async def busy(**options: Any) -> AsyncIterator[tuple[Batcher, Gate]]:
    """A batcher whose first call parks at the gate."""
    gate = Gate()
    async with ThreadedMicroBatcher[Any, Any](gate, **options) as batcher:
        first = asyncio.ensure_future(batcher.submit(["first"]))
        try:
            await gate.inside()
            yield batcher, gate
        finally:
            gate.open()
        await first


async def calls_behind(cap: int | None, requests: list[list[int]]) -> list[list[int]]:
    """The costs of each call for requests of such costs, which all arrive while a call runs."""
    async with busy(max_batch_cost=cap) as (batcher, gate):
        callers = [asyncio.ensure_future(batcher.submit(costs, costs)) for costs in requests]
        await settle()
        gate.open()
        assert [tags(await caller) for caller in callers] == requests
    return gate.calls[1:]


def test_its_options_keep_their_names_and_defaults() -> None:
    options = inspect.signature(ThreadedMicroBatcher).parameters
    assert next(iter(options)) == "fn"
    theirs = {
        "max_batch_cost": None,
        "on_start": None,
        "on_stop": None,
        "name": "micro-batcher",
        "join_timeout_s": 10.0,
    }
    assert {name: options[name].default for name in theirs} == theirs
    assert all(options[name].kind is inspect.Parameter.KEYWORD_ONLY for name in theirs)
    assert list(inspect.signature(ThreadedMicroBatcher.submit).parameters)[:3] == ["self", "items", "costs"]


@pytest.mark.parametrize(
    ("cap", "requests", "calls"),
    [
        pytest.param(5, [[3], [3], [1]], [[3, 1], [3]], id="never 3 and 3 under 5"),
        pytest.param(None, [[1000]] * 4, [[1000] * 4], id="no cap, one batch"),
        pytest.param(None, [[1, 1, 1], [1]], [[1] * 4], id="requests share a batch"),
        pytest.param(5, [[3, 3, 3]], [[3], [3], [3]], id="a request larger than a batch"),
        pytest.param(
            10,
            [[7], [6], [3], [4], [7], [6], [3], [4]],
            [[7, 3], [6, 4], [7, 3], [6, 4]],
            id="four calls, not six",
        ),
    ],
)
async def test_what_queues_behind_a_call_is_packed(
    cap: int | None, requests: list[list[int]], calls: list[list[int]]
) -> None:
    assert await calls_behind(cap, requests) == calls


@pytest.mark.parametrize("cost", [0, -1, True, 2.5, float("nan"), float("inf"), "3", None, 6, 10**30])
async def test_a_cost_that_cannot_be_fails_its_request_alone_and_at_once(cost: Any) -> None:
    async with busy(max_batch_cost=5) as (batcher, gate):
        before = asyncio.ensure_future(batcher.submit(["before"], [5]))
        refused = asyncio.ensure_future(batcher.submit(["good", "bad"], [1, cost]))
        after = asyncio.ensure_future(batcher.submit(["after"], [np.int64(5)]))  # type: ignore[list-item]
        error = await error_of(refused)  # while the call still runs
        assert isinstance(error, InvalidInput)
        assert str(error).startswith("item 2 of 2")
        gate.open()
        assert [tags(await before), tags(await after)] == [["before"], ["after"]]
    assert gate.calls == [["first"], ["before"], ["after"]]


async def test_bad_items_that_were_cancelled_while_queued_never_run_and_cost_their_neighbour_nothing() -> (
    None
):
    async with busy(max_batch_cost=10) as (batcher, gate):
        bad = asyncio.ensure_future(batcher.submit(["bad", "bad too"], [9, 9]))
        good = asyncio.ensure_future(batcher.submit(["good"], [2]))
        await settle()
        bad.cancel()
        await settle()
        gate.open()
        assert tags(await good) == ["good"]
    assert gate.calls == [["first"], ["good"]]


async def test_a_queued_request_ends_at_its_callers_deadline_not_when_the_slot_is_free() -> None:
    async with busy() as (batcher, gate):
        with pytest.raises(asyncio.TimeoutError):  # while the call still runs
            await asyncio.wait_for(batcher.submit(["late"]), timeout=0.01)
    assert gate.calls == [["first"]]


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(lambda items: None, id="None"),
        pytest.param(lambda items: (item for item in items), id="generator"),
        pytest.param(lambda items: dict.fromkeys(items), id="dict"),
        pytest.param(lambda items: next(iter([])), id="StopIteration"),
        pytest.param(lambda items: sys.exit(3), id="SystemExit"),
        pytest.param(lambda items: items * 2, id="too many"),
    ],
)
async def test_whatever_a_call_does_its_callers_hear_of_it_and_the_next_call_runs(
    fault: Callable[[list[Any]], Any],
) -> None:
    fn: Callable[[list[Any]], Any] = fault
    async with ThreadedMicroBatcher[Any, Any](lambda items: fn(items)) as batcher:
        with pytest.raises(EncoderFailed):
            await asyncio.wait_for(batcher.submit(["a", "b"]), SOON_S)
        fn = list
        assert await asyncio.wait_for(batcher.submit(["a", "b"]), SOON_S) == ["a", "b"]


async def test_an_empty_request_is_answered_at_once_while_others_wait() -> None:
    async with busy() as (batcher, _):
        assert await batcher.submit([]) == []
        assert await batcher.submit([], [], []) == []


async def test_two_batchers_share_nothing() -> None:
    one, other = Echo(), Echo()
    async with (
        ThreadedMicroBatcher[Any, Any](one) as first,
        ThreadedMicroBatcher[Any, Any](other) as second,
    ):
        await asyncio.gather(first.submit([1]), second.submit([2]))
        await first.aclose()
        assert tags(await second.submit([3])) == [3]
    assert (one.calls, other.calls) == ([[1]], [[2], [3]])
