"""What the tests of batching share: items that can be watched, scripted ``fn``s, a batcher driven by hand."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

from retinue.batching import BatchRecord, RequestRecord, ThreadedMicroBatcher
from retinue.batching.actor import Actor
from retinue.batching.planner import Limits

Batcher: TypeAlias = ThreadedMicroBatcher[Any, Any]

#: A bound for waits that end at once when all is well.
SOON_S = 20.0


class Item:
    """An input that a weak reference can follow."""

    def __init__(self, tag: object = None) -> None:
        self.tag = tag


class Seen:
    """A result that names its input, so that any swap shows, and that a weak reference can follow."""

    def __init__(self, tag: object) -> None:
        self.tag = tag


class Echo:
    """An ``fn`` that keeps the tags of its calls and answers each with ``Seen`` of it.

    What is put into ``faults`` is raised by the next calls, one each; ``then`` runs within every call.
    """

    def __init__(self, then: Callable[[], object] | None = None) -> None:
        self.calls: list[list[Any]] = []
        self.buckets: list[int | None] = []
        self.faults: list[BaseException] = []
        self.then = then

    def __call__(self, items: list[Any], target_bucket: int | None = None) -> list[Seen]:
        tags = [tag_of(item) for item in items]
        self.calls.append(tags)
        self.buckets.append(target_bucket)
        if self.then is not None:
            self.then()
        if self.faults:
            raise self.faults.pop(0)
        return [Seen(tag) for tag in tags]


class Gate(Echo):
    """An ``Echo`` whose calls park inside until they are let through."""

    def __init__(self) -> None:
        super().__init__(self._park)
        self._inside = threading.Semaphore(0)
        self._let = threading.Semaphore(0)
        self._is_open = False

    def _park(self) -> None:
        self._inside.release()
        assert self._is_open or self._let.acquire(timeout=SOON_S), "nobody opened the gate"

    def wait_inside(self) -> None:
        """Block until a call that nobody waited for yet is inside."""
        assert self._inside.acquire(timeout=SOON_S), "no call came"

    async def inside(self) -> None:
        """``wait_inside`` that leaves the event loop alone."""
        await asyncio.to_thread(self.wait_inside)

    def let(self, calls: int = 1) -> None:
        """Let so many calls through, those inside and those to come."""
        self._let.release(calls)

    def open(self) -> None:
        """Park no call from now on."""
        self._is_open = True
        self.let()


class ByHand:
    """A batcher without its thread: the test is the actor thread, and time is what it says.

    The only place where a test reaches into a batcher: for the actor that it is the face of.
    """

    def __init__(self, fn: Callable[..., Any], clock: Clock | None = None, **options: Any) -> None:
        self.batcher: Batcher = ThreadedMicroBatcher(fn, **options)
        self.actor: Actor = self.batcher._actor
        if clock is not None:
            self.actor._clock = clock
        assert self.actor.begin()
        assert self.actor.open()

    def submit(
        self,
        *items: Any,
        costs: Sequence[int] | None = None,
        keys: Sequence[Hashable] | None = None,
    ) -> asyncio.Task[list[Any]]:
        """A caller, who has not run yet."""
        return asyncio.get_running_loop().create_task(self.batcher.submit(items, costs, keys))

    async def step(self) -> bool:
        """Let all callers arrive, take one step, let all callers hear of it."""
        await settle()
        stepped = self.actor.step()
        await settle()
        return stepped

    async def run_dry(self) -> None:
        """Take steps until nothing waits."""
        while await self.step():
            pass


class Watch:
    """An observer that keeps its records."""

    def __init__(self) -> None:
        self.batches: list[BatchRecord] = []
        self.requests: list[RequestRecord] = []

    def on_batch(self, record: BatchRecord) -> None:
        self.batches.append(record)

    def on_request(self, record: RequestRecord) -> None:
        self.requests.append(record)


class Clock:
    """Time that stands still until it is told otherwise."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def tick(self, seconds: float) -> None:
        self.now_s += seconds


def open_actor(fn: Callable[..., Any], limits: Limits | None = None, **options: Any) -> Actor:
    """An actor that takes requests, for ``step`` by hand."""
    actor = Actor(fn, limits or Limits(), **options)
    assert actor.begin()
    assert actor.open()
    return actor


async def settle() -> None:
    """Let the event loop do all that it can do now."""
    for _ in range(5):
        await asyncio.sleep(0)


async def error_of(caller: asyncio.Future[Any]) -> BaseException:
    """How ``caller`` failed; also frees it of its traceback's grip on this frame."""
    await asyncio.wait({caller}, timeout=SOON_S)
    error = caller.exception()
    assert error is not None, f"it succeeded: {caller.result()}"
    return error


def tag_of(item: Any) -> Any:
    return item.tag if isinstance(item, Item) else item


def tags(results: Sequence[Any]) -> list[Any]:
    """What the results of an ``Echo`` are results of."""
    return [result.tag for result in results]


def dead(*references: weakref.ref[Any]) -> bool:
    """Whether nothing keeps what these point at, cycles aside."""
    gc.collect()
    return all(reference() is None for reference in references)
