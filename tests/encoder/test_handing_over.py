"""The last preprocess of a request hands it to the batcher; who leaves around that moment leaves nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from retinue import AsyncVisionEncoder, EncoderUnavailable, Overloaded, Preprocessed
from retinue.batching import ThreadedMicroBatcher

from .support import LIMIT_S, Gate, Probe, happened, queued, refusing, seen


@contextmanager
def around_enqueue(
    before: Callable[[], object] = lambda: None, after: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Let something happen on the pool's thread around each hand-over."""
    enqueue = ThreadedMicroBatcher.enqueue

    def wrapped(batcher: Any, *args: Any) -> None:
        before()
        enqueue(batcher, *args)
        after()

    with mock.patch.object(ThreadedMicroBatcher, "enqueue", wrapped):
        yield


async def test_the_event_loop_is_told_of_a_request_once() -> None:
    told = 0
    loop = asyncio.get_running_loop()
    tell = loop.call_soon_threadsafe

    def count(*args: Any, **options: Any) -> Any:
        nonlocal told
        told += 1
        return tell(*args, **options)

    async with AsyncVisionEncoder(Probe(), "a model") as encoder:
        with mock.patch.object(loop, "call_soon_threadsafe", count):
            assert await encoder.encode([1, 2, 3]) == seen(1, 2, 3)
    assert told == 1


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("way", ["cancelled", "closed"])
async def test_who_leaves_around_the_handing_over_leaves_nothing_to_a_batch(moment: str, way: str) -> None:
    """1 the batcher is busy, 2 a request is handed over, 3 its caller leaves, 4 the batcher goes on."""
    gate, handing, left = Gate(), threading.Event(), threading.Event()
    backend = Probe(refusing(Preprocessed), forward=lambda items: gate() if items == ["first"] else None)
    async with AsyncVisionEncoder(backend, "a model") as encoder:
        first = asyncio.create_task(encoder.encode(["first"]))
        await gate.reached()

        def pause() -> None:
            handing.set()
            assert left.wait(LIMIT_S)

        with around_enqueue(**{moment: pause}):
            if way == "cancelled":
                task = asyncio.create_task(encoder.encode(["gone"]))
                await happened(handing)
                task.cancel()
                await asyncio.wait({task})
            else:
                abandoned = encoder.encode(["gone"])
                abandoned.send(None)
                await happened(handing)
                abandoned.close()
            left.set()
            await queued(encoder)
        last = asyncio.create_task(encoder.encode(["last"]))
        gate.open()
        assert await first == seen("first")
        assert await last == seen("last")
        assert encoder.pending().items == 0
    assert backend.batches == [["first"], ["last"]]


async def test_an_encode_that_is_abandoned_after_the_handing_over_reaches_no_batch() -> None:
    gate = Gate()
    backend = Probe(refusing(Preprocessed), forward=lambda items: gate() if items == ["first"] else None)
    async with AsyncVisionEncoder(backend, "a model") as encoder:
        first = asyncio.create_task(encoder.encode(["first"]))
        await gate.reached()
        abandoned = encoder.encode(["gone"])
        abandoned.send(None)
        await queued(encoder)
        assert encoder.pending().items == 1
        abandoned.close()
        gate.open()
        assert await first == seen("first")
        assert await encoder.encode(["last"]) == seen("last")
    assert backend.batches == [["first"], ["last"]]


async def test_what_is_answered_before_the_handing_over_returns_is_no_problem() -> None:
    """The batch runs and its caller is told, all while the pool's thread is still in ``enqueue``."""
    answered = threading.Event()
    backend = Probe()
    async with AsyncVisionEncoder(backend, "a model") as encoder:
        with around_enqueue(after=lambda: answered.wait(LIMIT_S)):
            assert await encoder.encode([1]) == seen(1)
            answered.set()
        assert await encoder.encode([2]) == seen(2)


async def test_what_the_batcher_refuses_is_the_callers_error() -> None:
    gate = Gate()
    backend = Probe(forward=gate)
    async with AsyncVisionEncoder(backend, "a model", max_pending_cost=1) as encoder:
        first = asyncio.create_task(encoder.encode([1]))
        await gate.reached()
        with pytest.raises(Overloaded, match="max_pending_cost=1"):
            await encoder.encode([2])
        gate.open()
        assert await first == seen(1)
    with pytest.raises(EncoderUnavailable):
        await encoder.encode([3])


async def test_a_key_that_cannot_be_compared_fails_its_request_alone() -> None:
    class Key:
        def __hash__(self) -> int:
            return 1

        def __eq__(self, other: object) -> bool:
            raise ArithmeticError("no comparing")

    gate = Gate()
    backend = Probe(refusing(lambda raw: Preprocessed(raw, key=raw)), forward=lambda items: gate())
    async with AsyncVisionEncoder(backend, "a model") as encoder:
        first = asyncio.create_task(encoder.encode([Key()]))
        await gate.reached()
        waits = asyncio.create_task(encoder.encode([Key()]))
        await asyncio.sleep(0)
        await queued(encoder)
        with pytest.raises(ArithmeticError):
            await asyncio.wait_for(encoder.encode([Key()]), LIMIT_S)
        gate.open()
        assert len(await first) == len(await waits) == 1
