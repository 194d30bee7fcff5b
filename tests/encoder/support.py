"""Backends that show what is done to them, and gates by which a test orders threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from retinue import AsyncVisionEncoder, InvalidInput, Preprocessed, VisionEncoderBackend

LIMIT_S = 20.0  # a wait that takes longer is a failure

T = TypeVar("T")


class Gate:
    """A place in a backend where its thread waits until the test lets it on."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._opened = threading.Event()

    def __call__(self, *_: object) -> None:
        self._reached.set()
        if not self._opened.wait(LIMIT_S):
            raise AssertionError("nobody opened the gate")

    def before(self, function: Callable[..., T]) -> Callable[..., T]:
        """``function``, behind this gate."""

        def wait_and_call(*args: Any) -> T:
            self()
            return function(*args)

        return wait_and_call

    async def reached(self) -> None:
        await happened(self._reached)

    def open(self) -> None:
        self._opened.set()


async def happened(event: threading.Event) -> None:
    """Wait for another thread's ``event``."""
    assert await asyncio.to_thread(event.wait, LIMIT_S)


def nothing(*_: object) -> None:
    pass


class Bare(VisionEncoderBackend[Any, Any, Any]):
    """A backend without preprocess. Its artifact for an item is ``("seen", item)``.

    ``build``, ``forward`` and ``close`` are called within the method of that name, and may raise or wait.
    """

    def __init__(
        self,
        *,
        build: Callable[[str], object] = nothing,
        forward: Callable[[list[Any]], object] = nothing,
        close: Callable[[], object] = nothing,
        max_batch_cost: int | None = None,
        max_batch_items: int | None = None,
        buckets: Sequence[int] = (),
        preprocess_concurrency: Any = None,
    ) -> None:
        self.max_batch_cost = max_batch_cost
        self.max_batch_items = max_batch_items
        self.buckets = buckets
        self.preprocess_concurrency = preprocess_concurrency
        self._build, self._forward, self._close = build, forward, close
        self.calls: list[str] = []  # of build, forward_batch and close, in order
        self.threads: list[int] = []  # that ran them
        self.batches: list[list[Any]] = []
        self.target_buckets: list[int | None] = []

    def _note(self, call: str) -> None:
        self.calls.append(call)
        self.threads.append(threading.get_ident())

    def build(self, model_id: str) -> None:
        self._note("build")
        self._build(model_id)

    def forward_batch(self, items: list[Any], target_bucket: int | None = None) -> Sequence[Any]:
        self._note("forward_batch")
        self.batches.append(list(items))
        self.target_buckets.append(target_bucket)
        self._forward(items)
        return [("seen", item) for item in items]

    def close(self) -> None:
        self._note("close")
        self._close()


class Probe(Bare):
    """A backend with a preprocess: the function that it is given, which gets the raw."""

    def __init__(
        self,
        preprocess: Callable[[Any], Any] = Preprocessed,
        *,
        preprocess_concurrency: int | None = 1,  # more would begin images in any order
        **options: Any,
    ) -> None:
        super().__init__(preprocess_concurrency=preprocess_concurrency, **options)
        self._preprocess = preprocess
        self.begun: list[Any] = []  # the raws whose preprocess began, in order

    def preprocess(self, raw: Any) -> Preprocessed[Any]:
        self.begun.append(raw)
        prepared: Preprocessed[Any] = self._preprocess(raw)
        return prepared


def seen(*items: Any) -> list[tuple[str, Any]]:
    """The artifacts of ``items``."""
    return [("seen", item) for item in items]


def refusing(preprocess: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``preprocess``, but refusing the raw that ``queued`` sends."""

    def refuse(raw: Any) -> Any:
        if raw is _MARK:
            raise InvalidInput("a mark")
        return preprocess(raw)

    return refuse


_MARK = object()


async def queued(encoder: AsyncVisionEncoder[Any, Any, Any]) -> None:
    """Return when every request whose task was made before this waits for a batch, or has ended.

    The one pool thread takes images in the order of their coming, and the event loop its wake-ups; so a
    request that fails in preprocess, at the end of the line, hears of it after all others.
    """
    await asyncio.sleep(0)  # the tasks take their first step
    try:
        await encoder.encode([_MARK])
    except InvalidInput:
        return
    raise AssertionError("the backend's preprocess must be refusing()")


def live_threads(name: str) -> list[str]:
    """Names of the living threads of the encoder or pool called ``name``."""
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith(name))


async def ended(name: str) -> None:
    """Wait until the threads of the encoder called ``name``, which somebody has told to end, have done so."""
    for thread in threading.enumerate():
        if thread.name.startswith(name):
            await asyncio.to_thread(thread.join, LIMIT_S)
    assert live_threads(name) == []


def in_three_loops(main: Callable[[int], Coroutine[Any, Any, T]]) -> list[T]:
    """Run ``main(0)``, ``main(1)`` and ``main(2)`` at once, each on an event loop in a thread of its own."""
    at_once = threading.Barrier(3)

    def run(number: int) -> T:
        at_once.wait(LIMIT_S)
        return asyncio.run(main(number))

    with ThreadPoolExecutor(3) as threads:
        return list(threads.map(run, range(3)))
