"""After its outcome nothing of a request stays referenced, even where its exception is kept."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from retinue import AsyncVisionEncoder, InvalidInput, Preprocessed, RetinueError, VisionEncoderBackend
from retinue.encoder.pool import Pool

from .support import LIMIT_S, Bare, Gate, Probe, happened, seen


class Thing:
    """A raw, an item or an artifact: something that can be watched as it dies."""

    def __init__(self, watched: list[weakref.ref[Thing]], fault: str = "") -> None:
        self.fault = fault
        self._watched = watched
        watched.append(weakref.ref(self))

    def next(self) -> Thing:
        return Thing(self._watched, self.fault)


class Deadly(VisionEncoderBackend[Thing, Thing, Thing]):
    """Makes a new Thing in every phase, and fails where the Thing says so."""

    max_batch_cost = 8
    preprocess_concurrency = 1

    def build(self, model_id: str) -> None:
        pass

    def preprocess(self, raw: Thing) -> Any:
        item = raw.next()
        match raw.fault:
            case "value error":
                raise ValueError(raw, item)
            case "invalid input":
                raise InvalidInput("no")
            case "key error":
                raise KeyError("no")
            case "wrong type":
                return item
            case "bad cost":
                return Preprocessed(item, cost=0)
            case "bad key":
                return Preprocessed(item, key=[])  # type: ignore[arg-type]  # the case
            case "raising key":
                return Preprocessed(item, key=Unhashable())
            case "over the cap":
                return Preprocessed(item, cost=9)
        return Preprocessed(item)

    def forward_batch(self, items: list[Thing], target_bucket: int | None = None) -> Sequence[Thing]:
        artifacts = [item.next() for item in items]
        if any(item.fault == "forward" for item in items):
            raise RuntimeError("no")
        if any(item.fault == "count" for item in items):
            return artifacts[1:]
        return artifacts


class Unhashable:
    def __hash__(self) -> int:
        raise RuntimeError("no")


class DeadlyWithoutPreprocess(Deadly):
    preprocess = VisionEncoderBackend.preprocess


FAULTS = [
    "value error",
    "invalid input",
    "key error",
    "wrong type",
    "bad cost",
    "bad key",
    "raising key",
    "over the cap",
    "forward",
    "count",
]


async def all_dead(encoder: AsyncVisionEncoder[Thing, Thing, Any], watched: list[weakref.ref[Thing]]) -> bool:
    """Whether all are dead; whatever thread served them has gone on to something else since."""
    await encoder.encode([Thing([])])
    gc.collect()
    return [ref() for ref in watched] == [None] * len(watched)


@pytest.mark.parametrize("backend_type", [Deadly, DeadlyWithoutPreprocess])
async def test_nothing_of_an_answered_request_stays_alive(backend_type: type[Deadly]) -> None:
    watched: list[weakref.ref[Thing]] = []
    async with AsyncVisionEncoder(backend_type(), "a model") as encoder:
        for _ in range(3):
            await encoder.encode([Thing(watched), Thing(watched)])
        assert await all_dead(encoder, watched)
    assert len(watched) >= 3 * 4


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_kept_exception_keeps_nothing_else_alive(fault: str) -> None:
    watched: list[weakref.ref[Thing]] = []
    kept: list[BaseException] = []
    async with AsyncVisionEncoder(Deadly(), "a model") as encoder:
        try:
            await encoder.encode([Thing(watched), Thing(watched, fault), Thing(watched)])
        except RetinueError as error:
            kept.append(error)
        assert len(kept) == 1
        if fault == "value error":  # the author put them there
            kept[0].__cause__.args = ()  # type: ignore[union-attr]  # it has one
        assert await all_dead(encoder, watched)


@pytest.mark.parametrize("fault", ["forward", "count"])
async def test_a_kept_exception_of_a_backend_without_preprocess_keeps_nothing_either(fault: str) -> None:
    watched: list[weakref.ref[Thing]] = []
    kept: list[BaseException] = []
    async with AsyncVisionEncoder(DeadlyWithoutPreprocess(), "a model") as encoder:
        try:
            await encoder.encode([Thing(watched), Thing(watched, fault)])
        except RetinueError as error:
            kept.append(error)
        assert len(kept) == 1
        assert await all_dead(encoder, watched)


@pytest.mark.parametrize("fault", FAULTS)
async def test_an_exception_that_nobody_keeps_is_freed_without_the_garbage_collector(fault: str) -> None:
    refs: list[weakref.ref[BaseException]] = []
    async with AsyncVisionEncoder(Deadly(), "a model") as encoder:
        gc.collect()
        gc.disable()
        try:
            try:
                await encoder.encode([Thing([]), Thing([], fault)])
            except RetinueError as error:
                refs.append(weakref.ref(error))
            await encoder.encode([Thing([])])  # whatever thread served it has gone on to this
            assert [ref() for ref in refs] == [None]
        finally:
            gc.enable()


async def test_a_raw_is_let_go_as_soon_as_it_is_preprocessed() -> None:
    gate, died = Gate(), threading.Event()

    class Parks(Deadly):
        def preprocess(self, raw: Thing) -> Any:
            if raw.fault == "park":
                gate()
            else:
                weakref.finalize(raw, died.set)
            return super().preprocess(raw)

    async with AsyncVisionEncoder(Parks(), "a model") as encoder:
        request = asyncio.create_task(encoder.encode([Thing([]), Thing([], "park")]))
        await gate.reached()
        await happened(died)  # while its sibling is still at the gate
        gate.open()
        await request


async def test_nothing_of_a_request_whose_caller_left_stays_alive() -> None:
    gate = Gate()
    watched: list[weakref.ref[Thing]] = []
    kept: list[BaseException] = []

    class Parks(Deadly):
        def preprocess(self, raw: Thing) -> Any:
            if raw.fault == "park":
                gate()
            return super().preprocess(raw)

    async with AsyncVisionEncoder(Parks(), "a model") as encoder:
        request = asyncio.create_task(encoder.encode([Thing(watched, "park"), Thing(watched)]))
        await gate.reached()
        request.cancel()
        try:
            await request
        except asyncio.CancelledError as error:
            kept.append(error)
        del request
        gc.collect()
        assert watched[1]() is None  # at once: what has not begun is let go
        gate.open()
        assert await all_dead(encoder, watched)


@pytest.mark.parametrize("fault", ["", "key error"])
async def test_idle_pool_threads_hold_nothing(fault: str) -> None:
    together = threading.Barrier(3)
    deaths = threading.Semaphore(0)

    class Together(Deadly):
        preprocess_concurrency = 3

        def preprocess(self, raw: Thing) -> Any:
            weakref.finalize(raw, deaths.release)
            together.wait(LIMIT_S)
            prepared = super().preprocess(raw)
            weakref.finalize(prepared.item, deaths.release)
            return prepared

    async with AsyncVisionEncoder(Together(), "a model") as encoder:
        with contextlib.suppress(RetinueError):
            await encoder.encode([Thing([], fault) for _ in range(3)])
        for _ in range(3 if fault else 6):  # each dies while the threads have nothing else to do
            assert await asyncio.to_thread(deaths.acquire, timeout=LIMIT_S)


async def test_what_became_ready_beside_a_failure_is_let_go() -> None:
    watched: list[weakref.ref[Thing]] = []
    gate = Gate()

    class Holds(Deadly):
        preprocess_concurrency = 2

        def preprocess(self, raw: Thing) -> Any:
            if raw.fault == "park":
                gate()
            return super().preprocess(raw)

    async with AsyncVisionEncoder(Holds(), "a model") as encoder:
        parked = encoder.encode([Thing([], "park")])
        parking = asyncio.create_task(parked)
        await gate.reached()
        with contextlib.suppress(RetinueError):
            await encoder.encode([Thing(watched), Thing(watched, "key error")])
        assert await all_dead(encoder, watched)
        gate.open()
        await parking


async def test_callers_of_one_failed_batch_get_an_exception_each() -> None:
    gate = Gate()

    def forward(items: list[str]) -> None:
        gate()
        if "first" not in items:
            raise RuntimeError("the device is lost")

    async with AsyncVisionEncoder(Bare(forward=forward), "a model") as encoder:
        first = asyncio.create_task(encoder.encode(["first"]))
        await gate.reached()
        rest = [asyncio.create_task(encoder.encode([n])) for n in range(5)]
        await asyncio.sleep(0)  # each takes its first step, into the queue
        gate.open()
        assert await first == seen("first")
        errors = await asyncio.gather(*rest, return_exceptions=True)
    assert len({id(error) for error in errors}) == 5
    assert {str(error.__cause__) for error in errors if isinstance(error, RetinueError)} == {
        "the device is lost"
    }


def watch(make: Callable[[], Any]) -> weakref.ref[Any]:
    return weakref.ref(make())


def test_an_encoder_that_was_shut_down_and_dropped_is_freed() -> None:
    def used(kind: str) -> Any:
        backend = Probe(preprocess_concurrency=2)
        encoder = AsyncVisionEncoder(backend)
        encoder.load("a model")
        encoder.shutdown()
        return {"backend": backend, "encoder": encoder}[kind]

    for kind in ("backend", "encoder"):
        ref = watch(lambda kind=kind: used(kind))  # type: ignore[misc]  # a default binds the loop's variable
        gc.collect()
        assert ref() is None


def test_a_pool_that_was_closed_and_dropped_is_freed() -> None:
    def used() -> Pool:
        pool = Pool(2, "freed", grace_s=1.0)
        pool.start()
        pool.close()
        pool.stopped.result(LIMIT_S)
        pool.join()
        return pool

    ref = watch(used)
    gc.collect()
    assert ref() is None
