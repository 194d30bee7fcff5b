"""Every request gets its own artifacts, in order, whatever they are and whatever shared its batches."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from retinue import AsyncVisionEncoder, EncoderFailed, Preprocessed, VisionEncoderBackend

from .support import LIMIT_S, Bare, Gate, Probe, in_three_loops, queued, refusing, seen


@dataclass(frozen=True)
class Picture:
    """``tag``: its loop, request and place in the request."""

    tag: tuple[int, int, int]
    rows: int
    jitter_s: float


Row = tuple[tuple[int, int, int], int]


class TagBackend(VisionEncoderBackend[Picture, Picture, list[Row]]):
    """Rows that carry their picture's tag and their own number, so that any swap or loss shows."""

    max_batch_cost = 64
    preprocess_concurrency = 4

    def __init__(self) -> None:
        self.costs: list[int] = []
        self.requests_split = 0
        self._last: set[tuple[int, int]] = set()

    def build(self, model_id: str) -> None:
        pass

    def preprocess(self, raw: Picture) -> Preprocessed[Picture]:
        time.sleep(raw.jitter_s)  # nobody waits for it: it shuffles the order in which pictures are ready
        return Preprocessed(raw, cost=raw.rows, key=raw.rows % 3)

    def forward_batch(self, items: list[Picture], target_bucket: int | None = None) -> list[list[Row]]:
        self.costs.append(sum(item.rows for item in items))
        requests = {item.tag[:2] for item in items}
        self.requests_split += len(requests & self._last)
        self._last = requests
        return [[(item.tag, row) for row in range(item.rows)] for item in items]


@pytest.mark.parametrize("seed", range(5))
def test_every_row_reaches_the_request_and_the_place_that_it_belongs_to(seed: int) -> None:
    """FC-22: 64 concurrent requests of 1 to 5 pictures, 1 to 40 rows each, from 3 event loops."""
    backend = TagBackend()
    encoder = AsyncVisionEncoder(backend)
    encoder.load("a model")

    async def requests(loop_number: int) -> None:
        rng = random.Random(f"{seed} {loop_number}")

        async def one(number: int) -> None:
            pictures = [
                Picture((loop_number, number, place), rng.randint(1, 40), rng.random() * 0.002)
                for place in range(rng.randint(1, 5))
            ]
            artifacts = await encoder.encode(pictures)
            assert artifacts == [[(picture.tag, row) for row in range(picture.rows)] for picture in pictures]

        mine = range(loop_number, 64, 3)
        await asyncio.wait_for(asyncio.gather(*map(one, mine)), LIMIT_S)

    try:
        in_three_loops(requests)
    finally:
        encoder.shutdown()
    assert max(backend.costs) <= 64
    assert backend.requests_split > 0  # or the budget would not have forced splits within requests


async def test_concurrent_requests_share_a_batch_and_get_their_own_share_of_it() -> None:
    gate = Gate()
    backend = Probe(refusing(Preprocessed), forward=gate)
    async with AsyncVisionEncoder(backend, "a model") as encoder:
        first = asyncio.create_task(encoder.encode(["first"]))
        await gate.reached()
        pair = asyncio.create_task(encoder.encode(["a", "b"]))
        single = asyncio.create_task(encoder.encode(["c"]))
        await queued(encoder)
        gate.open()
        assert await first == seen("first")
        assert await pair == seen("a", "b")
        assert await single == seen("c")
    assert backend.batches == [["first"], ["a", "b", "c"]]


async def test_forward_batch_gets_the_bucket_that_holds_its_batch() -> None:
    backend = Probe(lambda raw: Preprocessed(raw, cost=raw, key=raw), buckets=(2, 4, 8))
    async with AsyncVisionEncoder(backend, "a model") as encoder:
        await encoder.encode([1, 2, 3, 8])
    assert backend.target_buckets == [2, 2, 4, 8]


@pytest.mark.parametrize("backend_type", [Bare, Probe])
async def test_no_images_are_no_artifacts_and_no_call(backend_type: type[Bare]) -> None:
    backend = backend_type()
    async with AsyncVisionEncoder(backend, "a model") as encoder:
        assert await encoder.encode([]) == []
        assert await encoder.encode(()) == []
    assert backend.batches == []


class Returns(VisionEncoderBackend[Any, Any, Any]):
    """Returns, for each item, the item; or what ``whole`` makes of all of them."""

    def __init__(self, whole: Any = list) -> None:
        self._whole = whole

    def build(self, model_id: str) -> None:
        pass

    def forward_batch(self, items: list[Any], target_bucket: int | None = None) -> Sequence[Any]:
        artifacts: Sequence[Any] = self._whole(items)
        return artifacts


@pytest.mark.parametrize(
    "artifact",
    [None, 0, "", [], {}, float("nan"), NotImplemented, ValueError("as a value"), np.zeros((2, 3)), object()],
    ids=lambda artifact: type(artifact).__name__,
)
async def test_an_artifact_may_be_anything(artifact: Any) -> None:
    async with AsyncVisionEncoder(Returns(), "a model") as encoder:
        first, second = await encoder.encode([artifact, artifact])
    assert first is artifact
    assert second is artifact


@pytest.mark.parametrize("whole", [tuple, np.stack])
async def test_artifacts_may_come_as_a_tuple_or_as_an_array_whose_first_axis_is_the_batch(whole: Any) -> None:
    async with AsyncVisionEncoder(Returns(whole), "a model") as encoder:
        artifacts = await encoder.encode([np.full((2, 3), n) for n in range(3)])
    assert [artifact.tolist() for artifact in artifacts] == [[[n] * 3] * 2 for n in range(3)]


@pytest.mark.parametrize(
    "whole",
    [
        lambda items: items[1:],
        lambda items: [*items, 0],
        lambda items: None,
        iter,
        set,
        dict.fromkeys,
        "".join,
    ],
    ids=["too few", "too many", "None", "iterator", "set", "dict", "str"],
)
async def test_anything_else_is_a_broken_contract(whole: Any) -> None:
    async with AsyncVisionEncoder(Returns(whole), "a model") as encoder:
        with pytest.raises(EncoderFailed, match="one result per item: expected"):
            await asyncio.wait_for(encoder.encode(["a", "b", "c"]), LIMIT_S)


@pytest.mark.parametrize(
    "error", [ValueError("shape"), StopIteration(), SystemExit(3), asyncio.CancelledError()]
)
async def test_whatever_forward_batch_raises_is_the_backends_fault(error: BaseException) -> None:
    def forward(items: list[str]) -> None:
        if "bad" in items:
            raise error

    async with AsyncVisionEncoder(Probe(forward=forward), "a model") as encoder:
        with pytest.raises(EncoderFailed) as caught:
            await asyncio.wait_for(encoder.encode(["bad"]), LIMIT_S)
        assert caught.value.__cause__ is error
        assert await encoder.encode(["next"]) == seen("next")


async def test_limits_are_read_once_when_the_encoder_loads() -> None:
    backend = Bare()
    encoder = AsyncVisionEncoder(backend)
    backend.max_batch_items = 2  # before load: counts
    await encoder.aload("a model")
    backend.max_batch_items = 1  # after: does not
    await encoder.encode(["a", "b", "c"])
    await encoder.aclose()
    assert backend.batches == [["a", "b"], ["c"]]


async def test_an_observer_hears_of_batches_and_requests() -> None:
    heard = threading.Event()
    records: list[Any] = []

    class Watch:
        def on_batch(self, record: Any) -> None:
            records.append(record)

        def on_request(self, record: Any) -> None:
            records.append(record)
            heard.set()

    backend = Probe(lambda raw: Preprocessed(raw, cost=3, key="shape"))
    async with AsyncVisionEncoder(backend, "a model", observer=Watch()) as encoder:
        await encoder.encode(["a", "b"])
    assert heard.is_set()
    batch, request = records
    assert (batch.items, batch.requests, batch.cost, batch.key) == (2, 1, 6, "shape")
    assert (request.items, request.cost, request.batches, request.outcome) == (2, 6, (1,), "ok")
