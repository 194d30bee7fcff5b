"""Many races at once, in real threads: every outcome is right, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from retinue.batching import ThreadedMicroBatcher
from retinue.errors import EncoderUnavailable

from .support import SOON_S, Batcher, Gate

LOOPS = 4


@pytest.fixture(autouse=True)
def nothing_is_left(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No thread, and no complaint of an event loop, a future or the batcher."""
    before = set(threading.enumerate())
    with caplog.at_level(logging.WARNING):
        yield
        gc.collect()
    assert set(threading.enumerate()) <= before
    assert [record.getMessage() for record in caplog.records] == []


def double(items: list[int]) -> list[int]:
    return [item * 2 for item in items]


def on_loops(main: Any) -> list[Any]:
    """What ``main(number)`` returns on each of several event loops, each in a thread of its own."""
    with ThreadPoolExecutor(LOOPS) as pool:
        return list(pool.map(lambda number: asyncio.run(main(number)), range(LOOPS)))


def test_twelve_thousand_eight_hundred_submissions_from_four_loops() -> None:
    calls: list[tuple[int, int]] = []

    def fn(items: list[int]) -> list[int]:
        calls.append((len(items), sum(1 + item % 3 for item in items)))
        return double(items)

    async def caller(first: int) -> None:
        items = list(range(first, first + 1 + first % 3))
        results = await batcher.submit(items, [1 + item % 3 for item in items], [item % 2 for item in items])
        assert results == double(items)

    async def main(number: int) -> int:
        for turn in range(8):
            first = 1_000_000 * number + 1000 * turn
            await asyncio.gather(*(caller(first + index) for index in range(400)))
        return 8 * 400

    batcher: Batcher = ThreadedMicroBatcher(fn, max_batch_cost=64, max_batch_items=40)
    batcher.start()
    assert sum(on_loops(main)) == 12_800
    batcher.shutdown()
    assert all(items <= 40 and cost <= 64 for items, cost in calls)


async def test_a_thousand_cancellations_race_with_their_calls() -> None:
    chance = random.Random(7)
    outcomes = {"ok": 0, "cancelled": 0}
    async with ThreadedMicroBatcher[int, int](double, max_batch_items=3) as batcher:
        for number in range(1000):
            leaver = asyncio.ensure_future(batcher.submit([number, number + 1]))
            neighbour = asyncio.ensure_future(batcher.submit([-number, number]))
            for _ in range(chance.randrange(12)):
                await asyncio.sleep(0)
            leaver.cancel()
            assert await neighbour == [-2 * number, 2 * number]
            await asyncio.wait({leaver})
            if leaver.cancelled():
                outcomes["cancelled"] += 1
            else:
                assert leaver.result() == [2 * number, 2 * number + 2]
                outcomes["ok"] += 1
    assert sum(outcomes.values()) == 1000
    assert outcomes["cancelled"] > 0


def test_a_thousand_starts_race_with_their_shutdowns() -> None:
    chance = random.Random(7)
    started, stopped, outcomes = [], [], []

    def start(batcher: Batcher, together: threading.Barrier) -> None:
        together.wait(SOON_S)
        try:
            batcher.start()
        except EncoderUnavailable:
            outcomes.append("shut down meanwhile")
        else:
            outcomes.append("started")

    def shut_down(batcher: Batcher, together: threading.Barrier, drain: bool) -> None:
        together.wait(SOON_S)
        batcher.shutdown(drain=drain)

    with ThreadPoolExecutor(3) as pool:
        for _ in range(1000):
            batcher: Batcher = ThreadedMicroBatcher(
                double, on_start=lambda: started.append(1), on_stop=lambda: stopped.append(1)
            )
            together = threading.Barrier(3)
            racers = [
                pool.submit(start, batcher, together),
                pool.submit(shut_down, batcher, together, chance.random() < 0.5),
                pool.submit(shut_down, batcher, together, chance.random() < 0.5),
            ]
            for racer in racers:
                racer.result(SOON_S)
            batcher.shutdown()  # the other two may have come before the start
            assert "micro-batcher" not in [thread.name for thread in threading.enumerate()]
            with pytest.raises(EncoderUnavailable):
                batcher._actor.check_open()
    assert (len(started), len(stopped), len(outcomes)) == (1000, 1000, 1000)


@pytest.mark.parametrize("drain", [False, True])
def test_a_shutdown_under_load_answers_everybody(drain: bool) -> None:
    gate = Gate()
    batcher: Batcher = ThreadedMicroBatcher(gate, max_batch_items=16)
    batcher.start()
    arrived = threading.Barrier(LOOPS + 1)

    async def main(number: int) -> list[Any]:
        callers = [asyncio.ensure_future(batcher.submit([(number, index)])) for index in range(400)]
        await asyncio.sleep(0)
        arrived.wait(SOON_S)
        late = [asyncio.ensure_future(batcher.submit([(number, index)])) for index in range(400, 800)]
        for caller in callers[::7]:
            caller.cancel()
        return await asyncio.gather(*callers, *late, return_exceptions=True)

    def shut_down() -> None:
        arrived.wait(SOON_S)
        gate.open()
        batcher.shutdown(drain=drain)

    closer = threading.Thread(target=shut_down)
    closer.start()
    for number, answers in enumerate(on_loops(main)):
        served = 0
        for index, answer in enumerate(answers):
            if isinstance(answer, list):
                assert [result.tag for result in answer] == [(number, index)]
                served += 1
            else:
                left = index < 400 and index % 7 == 0
                assert type(answer) is (asyncio.CancelledError if left else EncoderUnavailable)
                assert left or not drain or index >= 400
        assert not drain or served >= 400 - 58
    closer.join()
    batcher.shutdown()
