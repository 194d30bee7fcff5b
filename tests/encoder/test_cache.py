"""An image that is known, or already on its way, is encoded once; nobody pays for another's misfortune."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import random
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from retinue import (
    AsyncVisionEncoder,
    BackendLost,
    BatchRecord,
    DeadlineExceeded,
    EncoderFailed,
    EncoderUnavailable,
    InvalidInput,
    Overloaded,
    Preprocessed,
    RequestRecord,
    RetinueError,
)
from retinue.batching import ThreadedMicroBatcher
from retinue.encoder.cache import Cached

from .support import LIMIT_S, Bare, Gate, Probe, happened, in_three_loops, queued, refusing

WIDTH = 8  # of artifacts
ROW_BYTES = 4 * WIDTH
PLENTY = 2**20

Encoder = AsyncVisionEncoder[Any, Any, Any]


def rows(raw: bytes, count: int = 1) -> np.ndarray[Any, Any]:
    """The artifact of a picture of ``WIDTH`` bytes or fewer: its bytes as float32."""
    values = np.frombuffer(raw.ljust(WIDTH), np.uint8).astype(np.float32)
    return np.tile(values, (count, 1))


class Pictures(Probe):
    """A backend whose raws are bytes and whose artifacts are ``rows``, as ``form`` makes them."""

    def __init__(
        self,
        preprocess: Callable[[Any], Any] = Preprocessed,
        *,
        form: Callable[[Any], Any] = lambda artifact: artifact,
        count: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(preprocess, **options)
        self._form, self._count = form, count

    def forward_batch(self, items: list[Any], target_bucket: int | None = None) -> Sequence[Any]:
        super().forward_batch(items, target_bucket)
        return [self._form(rows(item, self._count)) for item in items]


def caching(backend: Bare, budget_bytes: int = PLENTY, **options: Any) -> Encoder:
    return AsyncVisionEncoder(backend, "a model", artifact_cache_bytes=budget_bytes, **options)


def waiting_at(
    gate: Gate, name: bytes | None, preprocess: Callable[[Any], Any] = Preprocessed
) -> Callable[[Any], Any]:
    """``preprocess``, but for the raw ``name`` behind ``gate``; for ``queued``, too."""
    return refusing(lambda raw: gate.before(preprocess)(raw) if raw == name else preprocess(raw))


def same(artifacts: Sequence[Any], *raws: bytes) -> bool:
    """Whether they are those of ``raws``."""
    return len(artifacts) == len(raws) and all(
        np.array_equal(np.asarray(artifact)[0], rows(raw)[0])
        for artifact, raw in zip(artifacts, raws, strict=True)
    )


async def started(*encodings: Any) -> list[asyncio.Task[Any]]:
    """These, each past its first step."""
    tasks = [asyncio.create_task(encoding) for encoding in encodings]
    await asyncio.sleep(0)
    return tasks


# -- what is known -------------------------------------------------------------------------------------


async def test_an_image_that_came_before_is_neither_preprocessed_nor_encoded() -> None:
    backend = Pictures()
    async with caching(backend) as encoder:
        assert same(await encoder.encode([b"a", b"b"]), b"a", b"b")
        assert same(await encoder.encode([b"b", b"c", b"a"]), b"b", b"c", b"a")
        assert same(await encoder.encode([b"c"]), b"c")
        assert encoder.cached() == Cached(entries=3, bytes=3 * ROW_BYTES, hits=3, misses=3)
    assert backend.begun == [b"a", b"b", b"c"]
    assert backend.batches == [[b"a", b"b"], [b"c"]]


async def test_without_a_budget_there_is_no_cache() -> None:
    backend = Pictures()
    async with caching(backend, 0) as encoder:
        for _ in range(2):
            assert same(await encoder.encode([b"a", b"a"]), b"a", b"a")
        assert encoder.cached() == Cached()
    assert backend.batches == [[b"a", b"a"]] * 2


async def test_what_was_used_before_all_others_makes_room() -> None:
    backend = Pictures()
    async with caching(backend, 2 * ROW_BYTES) as encoder:
        for raw in (b"a", b"b", b"a", b"c", b"a", b"b"):  # c takes the place of b
            assert same(await encoder.encode([raw]), raw)
        assert encoder.cached() == Cached(entries=2, bytes=2 * ROW_BYTES, hits=2, misses=4, evictions=2)
    assert backend.begun == [b"a", b"b", b"c", b"b"]


async def test_an_artifact_that_is_larger_than_the_budget_makes_no_room_for_itself() -> None:
    class Sizes(Pictures):
        def forward_batch(self, items: list[Any], target_bucket: int | None = None) -> Sequence[Any]:
            super().forward_batch(items)
            return [rows(item, 4 if item == b"large" else 1) for item in items]

    backend = Sizes()
    async with caching(backend, 3 * ROW_BYTES) as encoder:
        for raw in (b"a", b"large", b"a", b"large"):
            assert same(await encoder.encode([raw]), raw)
        assert encoder.cached() == Cached(entries=1, bytes=ROW_BYTES, hits=1, misses=3)
    assert backend.begun == [b"a", b"large", b"large"]


async def test_what_is_not_exactly_equal_is_another_image() -> None:
    backend = Pictures()
    raws = [b"", b"\0", b"\0\0", b"a", b"a "]
    async with caching(backend) as encoder:
        for _ in range(2):
            assert same(await encoder.encode(raws), *raws)
    assert backend.begun == raws


async def test_fresh_goes_past_the_cache() -> None:
    backend = Pictures()
    async with caching(backend) as encoder:
        await encoder.encode([b"a"])
        assert same(await encoder.encode([b"a"], fresh=True), b"a")
        assert same(await encoder.encode([b"b"], fresh=True), b"b")
        assert encoder.cached() == Cached(entries=1, bytes=ROW_BYTES, misses=1)
    assert backend.batches == [[b"a"], [b"a"], [b"b"]]


async def test_what_is_known_outlives_the_backends_loss() -> None:
    def forward(items: list[bytes]) -> None:
        if backend.batches.count([b"fatal"]) == 1 and items == [b"fatal"]:
            raise BackendLost

    backend = Pictures(forward=forward)
    async with caching(backend) as encoder:
        for raw in (b"a", b"fatal", b"a"):
            assert same(await encoder.encode([raw]), raw)
    assert backend.calls.count("build") == 2
    assert backend.batches == [[b"a"], [b"fatal"], [b"fatal"]]


async def test_a_broken_contract_empties_the_cache() -> None:
    """The backend overwrites the very array that it gave for the image before."""
    buffer = np.zeros((1, WIDTH), np.float32)

    def overwrite(artifact: Any) -> Any:
        buffer[:] = artifact
        return buffer[:]

    backend = Pictures(form=overwrite)
    async with caching(backend) as encoder:
        assert same(await encoder.encode([b"a"]), b"a")
        with pytest.raises(EncoderFailed, match="reuses its output buffer"):
            await encoder.encode([b"b"])
        assert encoder.cached().entries == 0
        assert same(await encoder.encode([b"a"]), b"a")


async def test_a_shut_down_encoder_keeps_no_artifact() -> None:
    gate = Gate()
    backend = Pictures(forward=lambda items: gate() if items == [b"late"] else None)
    async with caching(backend) as encoder:
        await encoder.encode([b"a"])
        (late,) = await started(encoder.encode([b"late"]))
        await gate.reached()
        encoder.shutdown(wait=False)
        gate.open()
        assert same(await late, b"late")
    assert (encoder.cached().entries, encoder.cached().bytes) == (0, 0)


# -- whose it is ---------------------------------------------------------------------------------------

FORMS: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda artifact: artifact,
    "torch": lambda artifact: torch.from_numpy(artifact.copy()),
    "bfloat16": lambda artifact: torch.from_numpy(artifact).bfloat16(),
}


@pytest.mark.parametrize("budget_bytes", [1, PLENTY], ids=["shared", "cached"])
@pytest.mark.parametrize("count", [1, 4096], ids=["small", "large"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
async def test_who_writes_into_an_artifact_changes_nobody_elses(
    form: Callable[[Any], Any], count: int, budget_bytes: int
) -> None:
    gate = Gate()
    backend = Pictures(refusing(Preprocessed), form=form, count=count, forward=gate)
    async with caching(backend, budget_bytes) as encoder:
        tasks = await started(*(encoder.encode([b"a", b"a"]) for _ in range(2)))
        await queued(encoder)
        gate.open()
        artifacts = [artifact for task in tasks for artifact in await task]
        for _ in range(2):
            artifacts += await encoder.encode([b"a"])
        for number, artifact in enumerate(artifacts):
            as_numbers = artifact.float().numpy() if isinstance(artifact, torch.Tensor) else artifact
            assert as_numbers.shape == (count, WIDTH)
            assert (as_numbers == rows(b"a", count)).all()
            assert type(artifact) is type(form(rows(b"a")))
            artifact[:] = number
    assert backend.batches == [[b"a"]] * (1 if budget_bytes == PLENTY else 3)


async def test_who_writes_into_what_nobody_else_wanted_yet_changes_nothing_that_is_kept() -> None:
    async with caching(Pictures()) as encoder:
        (artifact,) = await encoder.encode([b"a"])
        artifact[:] = -1
        assert same(await encoder.encode([b"a"]), b"a")


@pytest.mark.parametrize(
    "make", [lambda: [1, 2], lambda: {"rows": 1}, object, lambda: np.array([[object()]])]
)
async def test_what_is_no_array_is_neither_cached_nor_shared(make: Callable[[], Any]) -> None:
    """Not even between two who waited for it, nor for one who wants it twice."""

    class Others(Pictures):
        check_finite = False

        def forward_batch(self, items: list[Any], target_bucket: int | None = None) -> Sequence[Any]:
            super().forward_batch(items)
            return [make() for _ in items]

    gate = Gate()
    backend = Others(refusing(Preprocessed), forward=gate)
    async with caching(backend) as encoder:
        tasks = await started(encoder.encode([b"a", b"a"]), encoder.encode([b"a"]))
        await queued(encoder)
        gate.open()
        got = [artifact for task in tasks for artifact in await task]
        got += await encoder.encode([b"a", b"a"])
        assert encoder.cached().entries == 0
    assert len({id(artifact) for artifact in got}) == 5
    assert sum(map(len, backend.batches)) == 5


# -- what images are the same --------------------------------------------------------------------------


async def test_raws_that_nobody_can_tell_apart_are_never_cached() -> None:
    backend = Pictures(lambda raw: Preprocessed(bytes(raw.encode() if isinstance(raw, str) else raw)))
    raws = ["a", bytearray(b"a"), memoryview(b"a"), type("Bytes", (bytes,), {})(b"a")]
    async with caching(backend) as encoder:
        for _ in range(2):
            await encoder.encode(raws)
        assert encoder.cached() == Cached()
    assert len(backend.begun) == 2 * len(raws)


async def test_an_author_may_say_what_is_the_same_and_what_never_is() -> None:
    class Folds(Pictures):
        def cache_key(self, raw: bytes) -> Hashable | None:
            return None if raw == b"never" else raw.lower()

    backend = Folds()
    async with caching(backend) as encoder:
        for raw in (b"a", b"A", b"never", b"never"):
            await encoder.encode([raw])
    assert backend.begun == [b"a", b"never", b"never"]


async def test_a_raw_with_a_content_key_is_cached_but_not_as_another_type() -> None:
    class Tagged:
        def __init__(self, tag: int) -> None:
            self.content_key = tag

    class Others(Tagged):
        pass

    backend = Pictures(lambda raw: Preprocessed(b"%d" % raw.content_key))
    async with caching(backend) as encoder:
        for raw in (Tagged(1), Tagged(1), Tagged(2), Others(1), Others(1)):
            await encoder.encode([raw])
        assert (encoder.cached().hits, encoder.cached().misses) == (2, 3)


async def test_keys_are_made_off_the_event_loop_and_in_the_callers_context() -> None:
    tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant")
    threads = set()

    class Tenants(Bare):
        def cache_key(self, raw: bytes) -> Hashable | None:
            threads.add(threading.get_ident())
            return tenant.get(), raw

        def forward_batch(self, items: list[Any], target_bucket: int | None = None) -> Sequence[Any]:
            super().forward_batch(items)
            return [rows(item) for item in items]

    backend = Tenants()  # without a preprocess, and so with no threads but for this
    async with caching(backend) as encoder:
        for name in ("one", "other", "one"):
            tenant.set(name)
            assert same(await encoder.encode([b"a"]), b"a")
    assert backend.batches == [[b"a"], [b"a"]]
    assert threading.get_ident() not in threads


class Unequal:
    """A key that cannot be compared."""

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        raise ArithmeticError("no comparing")


def raising(error: BaseException) -> Callable[[Any], Any]:
    def function(_: Any) -> Any:
        raise error

    return function


@pytest.mark.parametrize(
    ("cache_key", "fault", "text"),
    [
        (raising(KeyError("no")), EncoderFailed, "image 2 of 2: cache_key raised KeyError: 'no'"),
        (raising(SystemExit(3)), EncoderFailed, "image 2 of 2: cache_key raised SystemExit: 3"),
        (raising(ValueError("no")), InvalidInput, "image 2 of 2 was refused by cache_key"),
        (raising(InvalidInput("no")), InvalidInput, "image 2 of 2: no"),
        (
            lambda _: [],
            EncoderFailed,
            "image 2 of 2: looking it up raised TypeError: unhashable type: 'list'",
        ),
        (
            lambda _: Unequal(),
            EncoderFailed,
            "image 2 of 2: looking it up raised ArithmeticError: no comparing",
        ),
    ],
)
async def test_a_key_that_cannot_be_fails_its_request_alone(
    cache_key: Callable[[Any], Any], fault: type[RetinueError], text: str
) -> None:
    class Keys(Pictures):
        def cache_key(self, raw: bytes) -> Hashable | None:
            return cache_key(raw) if raw.startswith(b"bad") else raw

    async with caching(Keys()) as encoder:
        with contextlib.suppress(
            RetinueError
        ):  # the first that cannot be compared has nothing to compare with
            await encoder.encode([b"bad"])
        with pytest.raises(fault) as caught:
            await asyncio.wait_for(encoder.encode([b"a", b"bad, too"]), LIMIT_S)
        assert str(caught.value) == text
        assert caught.value.position == 1  # type: ignore[attr-defined]  # both faults have one
        assert same(await encoder.encode([b"a"]), b"a")


# -- what is on its way --------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["preprocess", "waiting", "forward"])
async def test_what_is_on_its_way_is_encoded_once_for_all_who_want_it(phase: str) -> None:
    first, gate = Gate(), Gate()

    def forward(items: list[bytes]) -> None:
        if items == [b"first"]:
            first()
        elif phase == "forward":
            gate()

    backend = Pictures(
        waiting_at(gate, b"a" if phase == "preprocess" else None),
        forward=forward,
        preprocess_concurrency=2 if phase == "preprocess" else 1,
    )
    async with caching(backend) as encoder:
        tasks = await started(encoder.encode([b"first"]))
        await first.reached()
        tasks += await started(encoder.encode([b"a"]))
        if phase == "preprocess":
            await gate.reached()
        elif phase == "forward":
            await queued(encoder)
            first.open()
            await gate.reached()
        tasks += await started(encoder.encode([b"b", b"a"]), encoder.encode([b"a", b"a"]))
        await queued(encoder)
        gate.open()
        first.open()
        for task, raws in zip(tasks, ([b"first"], [b"a"], [b"b", b"a"], [b"a", b"a"]), strict=True):
            assert same(await asyncio.wait_for(task, LIMIT_S), *raws)
        assert (encoder.cached().joined, encoder.cached().misses) == (3, 3)
    assert backend.begun.count(b"a") == 1
    assert sum(batch.count(b"a") for batch in backend.batches) == 1


async def test_it_is_shared_between_event_loops() -> None:
    """One event loop begins an image and is gone before another's caller has it."""
    gate, begun, joined = Gate(), threading.Event(), threading.Event()
    backend = Pictures(refusing(Preprocessed), forward=gate)
    encoder = caching(backend)
    await encoder.aload("a model")

    async def begin() -> None:
        await started(encoder.encode([b"a"]))
        await gate.reached()
        begun.set()
        await happened(joined)

    beginning = asyncio.create_task(asyncio.to_thread(asyncio.run, begin()))
    await happened(begun)
    (task,) = await started(encoder.encode([b"a"]))
    await queued(encoder)
    assert encoder.cached().joined == 1
    joined.set()
    await beginning
    gate.open()
    assert same(await asyncio.wait_for(task, LIMIT_S), b"a")
    await encoder.aclose()
    assert backend.batches == [[b"a"]]


async def test_a_request_enters_the_queue_in_one_step() -> None:
    backend = Pictures()
    raws = [b"%d" % number for number in range(400)]
    async with caching(backend) as encoder:
        for first in range(0, len(raws), 8):
            await encoder.encode(raws[first : first + 8])
    assert backend.batches == [raws[first : first + 8] for first in range(0, len(raws), 8)]


async def test_to_an_observer_what_a_request_hands_over_is_one_request() -> None:
    records: list[Any] = []

    class Watch:
        def on_batch(self, record: BatchRecord) -> None:
            records.append((record.items, record.requests, record.cost))

        def on_request(self, record: RequestRecord) -> None:
            records.append((record.items, record.costs, record.keys, record.batches, record.outcome))

    def forward(items: list[bytes]) -> None:
        if b"bad" in items:
            raise RuntimeError

    backend = Pictures(lambda raw: Preprocessed(raw, cost=2, key="shape"), forward=forward)
    async with caching(backend, observer=Watch()) as encoder:
        await encoder.encode([b"a", b"b"])
        await encoder.encode([b"a", b"c"])
        await encoder.encode([b"a", b"c"])
        with pytest.raises(EncoderFailed, match="image 2 of 2"):
            await encoder.encode([b"d", b"bad"])
    assert records[:4] == [
        (2, 1, 4),
        (2, (2, 2), ("shape", "shape"), (1,), "ok"),
        (1, 1, 2),
        (1, (2,), ("shape",), (2,), "ok"),
    ]
    assert records[-1] == (2, (2, 2), ("shape", "shape"), (3, 4, 5), "failed")


async def test_the_event_loop_is_told_of_a_request_once() -> None:
    loop = asyncio.get_running_loop()
    async with caching(Pictures()) as encoder:
        with mock.patch.object(loop, "call_soon_threadsafe", wraps=loop.call_soon_threadsafe) as tell:
            await encoder.encode([b"a", b"b", b"a"])
            assert tell.call_count == 1
            await encoder.encode([b"a", b"b"])
            assert tell.call_count == 2


# -- who leaves ----------------------------------------------------------------------------------------


async def leave(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@contextlib.asynccontextmanager
async def busy(encoder: Encoder, gate: Gate) -> AsyncIterator[None]:
    """For so long, the forward of a ``busy_at`` backend is at ``gate``."""
    (task,) = await started(encoder.encode([b"busy"], fresh=True))
    await gate.reached()
    try:
        yield
    finally:
        gate.open()
    assert same(await asyncio.wait_for(task, LIMIT_S), b"busy")


def busy_at(gate: Gate) -> Callable[[list[Any]], object]:
    return lambda items: gate() if items == [b"busy"] else None


async def test_who_began_an_image_may_leave_and_only_what_others_want_goes_on() -> None:
    gate = Gate()
    backend = Pictures(refusing(Preprocessed), forward=busy_at(gate))
    async with caching(backend) as encoder:
        async with busy(encoder, gate):
            beginner, other = await started(encoder.encode([b"a", b"b"]), encoder.encode([b"b", b"c"]))
            await queued(encoder)
            assert encoder.pending().items == 3
            await leave(beginner)
            assert encoder.pending().items == 2
        assert same(await other, b"b", b"c")
    assert backend.begun[:4] == [b"busy", b"a", b"b", b"c"]
    assert backend.batches == [[b"busy"], [b"b", b"c"]]


async def test_who_began_an_image_may_leave_while_it_is_preprocessed() -> None:
    gate = Gate()
    backend = Pictures(waiting_at(gate, b"a"), preprocess_concurrency=2)
    async with caching(backend) as encoder:
        beginner, other = await started(encoder.encode([b"a"]), encoder.encode([b"a"]))
        await gate.reached()
        await queued(encoder)
        await leave(beginner)
        gate.open()
        assert same(await asyncio.wait_for(other, LIMIT_S), b"a")
    assert backend.begun.count(b"a") == 1
    assert backend.batches == [[b"a"]]


async def test_who_began_an_image_may_leave_while_it_is_encoded() -> None:
    gate = Gate()
    backend = Pictures(refusing(Preprocessed), forward=gate)
    async with caching(backend) as encoder:
        beginner, other = await started(encoder.encode([b"a"]), encoder.encode([b"a"]))
        await gate.reached()
        await queued(encoder)
        await leave(beginner)
        gate.open()
        assert same(await asyncio.wait_for(other, LIMIT_S), b"a")
    assert backend.batches == [[b"a"]]


@pytest.mark.parametrize("way", ["cancelled", "closed"])
async def test_what_nobody_waits_for_any_more_reaches_no_batch(way: str) -> None:
    gate = Gate()
    backend = Pictures(refusing(Preprocessed), forward=busy_at(gate))
    async with caching(backend) as encoder:
        async with busy(encoder, gate):
            if way == "cancelled":
                tasks = await started(*(encoder.encode([b"a"]) for _ in range(3)))
                await queued(encoder)
                for task in tasks:
                    await leave(task)
            else:
                abandoned = [encoder.encode([b"a"]) for _ in range(3)]
                for encoding in abandoned:
                    encoding.send(None)
                await queued(encoder)
                for encoding in abandoned:
                    encoding.close()
        assert same(await encoder.encode([b"b"]), b"b")
        assert encoder.cached().entries == 1
    assert backend.batches == [[b"busy"], [b"b"]]


async def test_who_comes_after_all_have_left_begins_anew() -> None:
    gate = Gate()
    backend = Pictures(refusing(Preprocessed), forward=busy_at(gate))
    async with caching(backend) as encoder:
        async with busy(encoder, gate):
            (gone,) = await started(encoder.encode([b"a"]))
            await queued(encoder)
            await leave(gone)
            (task,) = await started(encoder.encode([b"a"]))
            await queued(encoder)
        assert same(await asyncio.wait_for(task, LIMIT_S), b"a")
    assert backend.batches == [[b"busy"], [b"a"]]


async def test_an_encode_may_be_abandoned_in_a_thread_that_holds_the_lock() -> None:
    """As the garbage collector may do; here a key does, as it is compared."""
    victims: list[Any] = []

    class Key:
        def __init__(self, raw: bytes) -> None:
            self._raw = raw

        def __hash__(self) -> int:
            return 1

        def __eq__(self, other: object) -> bool:
            while victims:
                victims.pop().close()
            return isinstance(other, Key) and self._raw == other._raw

    class Keys(Pictures):
        def cache_key(self, raw: Any) -> Hashable | None:
            return Key(raw) if isinstance(raw, bytes) else None

    gate = Gate()
    backend = Keys(refusing(Preprocessed), forward=busy_at(gate))
    async with caching(backend) as encoder:
        async with busy(encoder, gate):
            for _ in range(2):
                victims.append(encoder.encode([b"a", b"b"]))
                victims[-1].send(None)
            await queued(encoder)  # by now the second has been compared with the first
            assert victims == []
            (task,) = await started(encoder.encode([b"b", b"c"]))
            await queued(encoder)
        assert same(await asyncio.wait_for(task, LIMIT_S), b"b", b"c")
    assert backend.batches == [[b"busy"], [b"b", b"c"]]


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("way", ["cancelled", "closed"])
async def test_who_leaves_around_the_handing_over_leaves_nothing_to_a_batch(moment: str, way: str) -> None:
    """1 the batcher is busy, 2 a request is handed over, 3 its caller leaves, 4 the batcher goes on."""
    gate, handing, left = Gate(), threading.Event(), threading.Event()
    enqueue_each = ThreadedMicroBatcher.enqueue_each

    def paused(batcher: Any, requests: Any, items: list[Any], *args: Any) -> None:
        if moment == "after":
            enqueue_each(batcher, requests, items, *args)
        if items == [b"gone"]:
            handing.set()
            assert left.wait(LIMIT_S)
        if moment == "before":
            enqueue_each(batcher, requests, items, *args)

    backend = Pictures(refusing(Preprocessed), forward=busy_at(gate))
    async with caching(backend) as encoder:
        async with busy(encoder, gate):
            with mock.patch.object(ThreadedMicroBatcher, "enqueue_each", paused):
                if way == "cancelled":
                    (task,) = await started(encoder.encode([b"gone"]))
                    await happened(handing)
                    await leave(task)
                else:
                    abandoned = encoder.encode([b"gone"])
                    abandoned.send(None)
                    await happened(handing)
                    abandoned.close()
                left.set()
                await queued(encoder)
        assert same(await encoder.encode([b"last"]), b"last")
        assert encoder.pending().items == 0
    assert backend.batches == [[b"busy"], [b"last"]]


# -- what fails ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "error", "fault", "text"),
    [
        ("preprocess", ValueError("secret"), InvalidInput, "image {} was refused by preprocess"),
        ("preprocess", InvalidInput("too dark"), InvalidInput, "image {}: too dark"),
        ("preprocess", KeyError("x"), EncoderFailed, "image {}: preprocess raised KeyError: 'x'"),
        ("forward", RuntimeError("x"), EncoderFailed, "image {}: forward_batch raised RuntimeError: x"),
    ],
)
async def test_a_failure_is_each_callers_own_and_is_forgotten(
    place: str, error: Exception, fault: type[RetinueError], text: str
) -> None:
    gate, failing = Gate(), [error]

    def fail(_: object) -> None:
        gate()
        for one in failing:
            raise one

    def preprocess(raw: Any) -> Any:
        if place == "preprocess" and raw == b"bad":
            fail(raw)
        return Preprocessed(raw)

    backend = Pictures(
        refusing(preprocess),
        forward=lambda items: fail(items) if place == "forward" and b"bad" in items else None,
        preprocess_concurrency=2 if place == "preprocess" else 1,
    )
    async with caching(backend) as encoder:
        tasks = await started(encoder.encode([b"bad"]))
        await gate.reached()
        tasks += await started(encoder.encode([b"a", b"bad"]), encoder.encode([b"bad", b"bad"]))
        await queued(encoder)
        gate.open()
        faults = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), LIMIT_S)
        places = [(fault, "1 of 1", 0), (fault, "2 of 2", 1), (fault, "1 of 2", 0)]
        for caught, (kind, image, position) in zip(faults, places, strict=True):
            assert isinstance(caught, kind)
            assert str(caught) == text.format(image)
            assert caught.position == position  # type: ignore[attr-defined]  # both faults have one
            assert caught.__cause__ is error
        assert len({id(caught) for caught in faults}) == 3
        assert backend.begun.count(b"bad") == 1
        failing.clear()
        assert same(await encoder.encode([b"bad", b"a"]), b"bad", b"a")


async def test_a_cost_that_no_batch_can_hold_names_the_place_in_each_request() -> None:
    gate = Gate()
    dear = waiting_at(gate, b"bad", lambda raw: Preprocessed(raw, cost=9 if raw == b"bad" else 1))
    backend = Pictures(dear, max_batch_cost=8, preprocess_concurrency=2)
    async with caching(backend) as encoder:
        tasks = await started(encoder.encode([b"bad"]))
        await gate.reached()
        tasks += await started(encoder.encode([b"a", b"bad"]))
        await queued(encoder)
        gate.open()
        for task, image in zip(tasks, ("image 1 of 1", "image 2 of 2"), strict=True):
            with pytest.raises(InvalidInput, match=f"{image} costs 9, which exceeds max_batch_cost=8"):
                await task


async def test_the_failure_of_a_sibling_is_not_the_images_own() -> None:
    """What failed for one request, another's image goes on without; and it waited for no preprocess of it."""
    gate = Gate()

    def preprocess(raw: Any) -> Any:
        if raw == b"bad":
            gate()
            raise ValueError
        return Preprocessed(raw)

    backend = Pictures(refusing(preprocess), preprocess_concurrency=2)
    async with caching(backend) as encoder:
        (failing,) = await started(encoder.encode([b"bad", b"a", b"b"]))
        await gate.reached()
        assert same(await asyncio.wait_for(encoder.encode([b"a"]), LIMIT_S), b"a")  # with "bad" at the gate
        gate.open()
        with pytest.raises(InvalidInput, match="image 1 of 3"):
            await failing
        assert encoder.cached().joined == 1
    assert backend.batches == [[b"a"]]


async def test_who_is_refused_for_want_of_room_takes_nobody_along() -> None:
    gate, slow = Gate(), Gate()
    backend = Pictures(waiting_at(slow, b"slow"), forward=busy_at(gate), preprocess_concurrency=2)
    async with caching(backend, max_pending_cost=3) as encoder:
        async with busy(encoder, gate):
            (large,) = await started(encoder.encode([b"a", b"b", b"slow"]))
            await slow.reached()
            (small,) = await started(encoder.encode([b"a", b"slow"]))
            await queued(encoder)
            slow.open()
            with pytest.raises(
                Overloaded, match="the request costs 3, together more than max_pending_cost=3"
            ):
                await large
        assert same(await asyncio.wait_for(small, LIMIT_S), b"a", b"slow")
    assert backend.begun.count(b"a") == backend.begun.count(b"slow") == 1
    assert backend.batches == [[b"busy"], [b"a", b"slow"]]


async def test_who_joins_while_the_batcher_is_asked_is_not_refused_along() -> None:
    """1 a large request is handed over, 2 a small one joins it, 3 the large one is refused."""
    gate, handing, joined = Gate(), threading.Event(), threading.Event()
    enqueue_each = ThreadedMicroBatcher.enqueue_each

    def paused(batcher: Any, requests: Any, items: list[Any], *args: Any) -> None:
        if len(items) == 3:
            handing.set()
            assert joined.wait(LIMIT_S)
        enqueue_each(batcher, requests, items, *args)

    backend = Pictures(refusing(Preprocessed), forward=busy_at(gate), preprocess_concurrency=2)
    async with caching(backend, max_pending_cost=3) as encoder:
        async with busy(encoder, gate):
            with mock.patch.object(ThreadedMicroBatcher, "enqueue_each", paused):
                (large,) = await started(encoder.encode([b"a", b"b", b"c"]))
                await happened(handing)
                (small,) = await started(encoder.encode([b"a"]))
                await queued(encoder)
                joined.set()
                with pytest.raises(Overloaded):
                    await large
        assert same(await asyncio.wait_for(small, LIMIT_S), b"a")
    assert backend.begun.count(b"a") == 1


async def test_what_preprocess_says_of_one_request_is_not_said_of_another() -> None:
    late: contextvars.ContextVar[bool] = contextvars.ContextVar("late", default=False)
    gate = Gate()

    def preprocess(raw: Any) -> Any:
        if raw == b"a":
            gate()
            if late.get():
                raise DeadlineExceeded("the caller's own is over")
        return Preprocessed(raw)

    backend = Pictures(refusing(preprocess), preprocess_concurrency=2)
    async with caching(backend) as encoder:
        late.set(True)
        tasks = await started(encoder.encode([b"a"]))
        await gate.reached()
        late.set(False)
        tasks += await started(encoder.encode([b"a"]))
        await queued(encoder)
        gate.open()
        with pytest.raises(DeadlineExceeded, match="the caller's own is over"):
            await tasks[0]
        assert same(await asyncio.wait_for(tasks[1], LIMIT_S), b"a")


@pytest.mark.parametrize("phase", ["preprocess", "forward"])
async def test_a_shutdown_leaves_nobody_waiting(phase: str) -> None:
    gate = Gate()
    backend = Pictures(
        waiting_at(gate, b"a" if phase == "preprocess" else None),
        forward=gate if phase == "forward" else busy_at(Gate()),
        preprocess_concurrency=2,
    )
    async with caching(backend) as encoder:
        tasks = await started(encoder.encode([b"a"]))
        await gate.reached()
        tasks += await started(encoder.encode([b"a"]), encoder.encode([b"b", b"a"]))
        if phase == "forward":
            tasks += await started(encoder.encode([b"b"]))
            await queued(encoder)
        encoder.shutdown(wait=False)
        outcomes: list[Any] = []
        served, refused = (tasks[:2], tasks[2:]) if phase == "forward" else ([], tasks)
        for task in refused:
            with pytest.raises(EncoderUnavailable) as caught:
                await asyncio.wait_for(task, LIMIT_S)
            outcomes.append(caught.value)
        gate.open()
        for task in served:  # by the forward that was running
            assert same(await asyncio.wait_for(task, LIMIT_S), b"a")
        assert len({id(error) for error in outcomes}) == len(refused)


# -- hygiene, and all at once --------------------------------------------------------------------------


class Thing:
    """Something that can be watched as it dies."""

    def __init__(self, watched: list[weakref.ref[Thing]], name: bytes = b"") -> None:
        self.name = name
        watched.append(weakref.ref(self))


FAULTS = ["", "preprocess", "cost", "forward", "key", "left", "left in forward"]


@pytest.mark.parametrize("fault", FAULTS)
async def test_nothing_of_a_request_stays_but_what_is_cached(fault: str) -> None:
    """Not by the exceptions of those who shared it, nor by an idle thread. Even contexts go."""
    watched: list[weakref.ref[Thing]] = []
    mine: contextvars.ContextVar[Thing] = contextvars.ContextVar("mine")
    gate, both = Gate(), threading.Barrier(2)  # pool threads

    class Things(Bare):
        def preprocess(self, raw: Any) -> Any:
            return refusing(preprocess)(raw)

        def cache_key(self, raw: Any) -> Hashable | None:
            if isinstance(raw, Thing) and raw.name == b"key":
                raise KeyError
            return raw.name if isinstance(raw, Thing) else None

        def forward_batch(self, items: list[Any], target_bucket: int | None = None) -> Sequence[Any]:
            item = items[0]
            if item.name != b"last":
                gate()
                if fault == "forward":
                    raise RuntimeError
            return [rows(item.name) for item in items]

    def preprocess(raw: Any) -> Any:
        if raw.name == b"preprocess":
            gate()
            raise ValueError
        if raw.name == b"last":
            both.wait(LIMIT_S)
            return Preprocessed(Thing([], raw.name))
        return Preprocessed(Thing(watched, raw.name), cost=0 if raw.name == b"cost" else 1)

    async def request() -> Any:
        mine.set(Thing(watched))
        return await encoder.encode([Thing(watched, b"good"), Thing(watched, fault.encode())])

    kept: list[Any] = []
    async with caching(Things(preprocess_concurrency=2)) as encoder:
        tasks = await started(request(), request())
        if fault not in ("cost", "key"):
            await gate.reached()
        for task in tasks:
            if fault.startswith("left"):
                task.cancel()
        if fault != "left":
            gate.open()
        kept += await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), LIMIT_S)
        assert all(isinstance(one, list if not fault else BaseException) for one in kept)
        del tasks, task
        gate.open()
        await encoder.encode([Thing([], b"last"), Thing([], b"last")], fresh=True)  # all threads have gone on
        gc.collect()
        assert [ref() for ref in watched if ref() is not None] == []


async def test_an_error_that_nobody_keeps_is_freed_without_the_garbage_collector() -> None:
    backend = Pictures(lambda raw: 1 / 0 if raw == b"bad" else Preprocessed(raw))
    refs: list[weakref.ref[BaseException]] = []
    async with caching(backend) as encoder:
        gc.collect()
        gc.disable()
        try:
            try:
                await encoder.encode([b"a", b"bad"])
            except EncoderFailed as error:
                refs.append(weakref.ref(error))
            await encoder.encode([b"b"], fresh=True)
            assert [ref() for ref in refs] == [None]
        finally:
            gc.enable()


@pytest.mark.parametrize("seed", range(3))
def test_everyone_gets_what_is_theirs_whoever_leaves_or_fails(seed: int) -> None:
    """From three event loops; of few images, so that most are shared; some leave, some images are bad."""

    def preprocess(raw: bytes) -> Any:
        if raw.startswith(b"bad"):
            raise ValueError
        return Preprocessed(raw, key=raw[0] % 2)

    def forward(items: list[bytes]) -> None:
        if b"poison" in items:
            raise RuntimeError

    backend = Pictures(preprocess, forward=forward, max_batch_items=3, preprocess_concurrency=3)
    encoder = caching(backend, 6 * ROW_BYTES)
    encoder.load("a model")
    album = [b"%d" % number for number in range(8)] + [b"bad", b"poison"]

    async def requests(loop_number: int) -> None:
        rng = random.Random(f"{seed} {loop_number}")

        async def one() -> None:
            raws = rng.choices(album, k=rng.randint(1, 4))
            is_good = not {b"bad", b"poison"} & set(raws)
            task = asyncio.create_task(encoder.encode(raws))
            for _ in range(rng.choice([0, 1, 2, 3, 100])):
                await asyncio.sleep(0)
            if rng.random() < 0.3:
                task.cancel()
            outcome: Any = (await asyncio.gather(task, return_exceptions=True))[0]
            if isinstance(outcome, asyncio.CancelledError):
                return
            if not is_good:
                assert isinstance(outcome, (InvalidInput, EncoderFailed))
                assert raws[outcome.position or 0] in (b"bad", b"poison")
                return
            assert same(outcome, *raws)
            for artifact in outcome:
                artifact[:] = -1

        for _ in range(20):
            await asyncio.wait_for(asyncio.gather(*(one() for _ in range(10))), LIMIT_S)

    try:
        in_three_loops(requests)
        cached = encoder.cached()
        assert encoder.pending().items == 0
    finally:
        encoder.shutdown()
    assert cached.bytes <= 6 * ROW_BYTES
    assert min(cached.hits, cached.joined, cached.evictions) > 0
    assert sum(map(len, backend.batches)) < cached.hits + cached.joined + cached.misses
