"""``AsyncVisionEncoder``: a backend, driven from asyncio.

Thread rules
    The backend's ``build``, ``forward_batch`` and ``close`` run on the batcher's thread, ``preprocess`` on
    the pool's; nothing of the backend ever runs on an event loop.
    ``_lock`` guards ``_batcher``, ``_pool``, ``_loaded`` and ``_preparing``; each ``_Preparation`` has one of
    its own. None is held while the backend or an event loop's callback runs.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import logging
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from retinue.batching import Observer, ThreadedMicroBatcher
from retinue.batching.outcome import describe, forget_frames
from retinue.batching.planner import Limits, positive_int
from retinue.encoder.backend import ArtifactT, ItemT, Preprocessed, RawT, VisionEncoderBackend
from retinue.encoder.pool import Pool
from retinue.errors import EncoderFailed, EncoderUnavailable, InvalidInput, RetinueError

logger = logging.getLogger("retinue")

SelfT = TypeVar("SelfT", bound="AsyncVisionEncoder[Any, Any, Any]")


class AsyncVisionEncoder(Generic[RawT, ItemT, ArtifactT]):
    """Encodes the images of concurrent requests in shared batches, each request getting its own, in order.

    ``async with AsyncVisionEncoder(backend, model_id) as encoder`` builds without blocking the event loop;
    ``load`` and ``shutdown`` do the same for code that is not asynchronous.

    ``preprocess_concurrency``: threads for ``preprocess``, in place of the backend's own choice.
    ``max_wait_s``, ``observer``, ``join_timeout_s``: as for ``ThreadedMicroBatcher``.
    """

    def __init__(
        self,
        backend: VisionEncoderBackend[RawT, ItemT, ArtifactT],
        model_id: str | None = None,
        *,
        preprocess_concurrency: int | None = None,
        max_wait_s: float = 0.0,
        observer: Observer | None = None,
        name: str = "vision-encoder",
        join_timeout_s: float = 10.0,
    ) -> None:
        self._backend = backend
        self._model_id = model_id
        self._threads = _threads(backend, preprocess_concurrency)
        self._max_wait_s = max_wait_s
        self._observer = observer
        self._name = name
        self._join_timeout_s = join_timeout_s
        self._lock = threading.Lock()
        self._loaded = False
        self._limits = Limits()
        self._batcher: ThreadedMicroBatcher[ItemT, ArtifactT] | None = None
        self._pool: Pool | None = None
        self._preparing: set[_Preparation] = set()

    # ---- life

    def load(self, model_id: str) -> None:
        """Build the backend on its thread and wait for it; raises what ``build`` raised.

        ``RuntimeError`` for a second load.
        """
        batcher = self._prepare_to_load(model_id)
        try:
            batcher.start()
        except BaseException:
            self.shutdown(wait=False)
            raise

    async def aload(self, model_id: str) -> None:
        """``load`` without blocking the event loop; a caller who leaves shuts the encoder down."""
        batcher = self._prepare_to_load(model_id)
        try:
            await batcher.astart()
        except BaseException:
            self.shutdown(wait=False)
            raise

    def shutdown(self, wait: bool = True) -> None:
        """Close the backend on its thread. At any moment, from any thread, any number of times.

        Requests that wait, or are being preprocessed, get ``EncoderUnavailable``; a running forward finishes
        and is delivered. ``wait`` blocks until the backend is closed, for ``join_timeout_s`` at most.
        """
        batcher, pool = self._detach()
        if batcher is not None:
            batcher.shutdown(wait)
        if wait and pool is not None and not pool.owns_current_thread():
            concurrent.futures.wait([pool.stopped], timeout=self._join_timeout_s)
            self._reap(pool)

    async def aclose(self) -> None:
        """``shutdown`` without blocking the event loop."""
        batcher, pool = self._detach()
        if batcher is not None:
            await batcher.aclose()
        if pool is not None:
            stopped = asyncio.wrap_future(pool.stopped)
            try:
                await asyncio.wait({stopped}, timeout=self._join_timeout_s)
            finally:
                stopped.cancel()  # only our wait for it
            self._reap(pool)

    async def __aenter__(self: SelfT) -> SelfT:
        if self._model_id is None:
            raise RuntimeError("AsyncVisionEncoder(backend, model_id) needs its model_id to be entered")
        await self.aload(self._model_id)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # ---- requests

    async def encode(self, raws: Sequence[RawT]) -> list[ArtifactT]:
        """Encode all of ``raws``; return one artifact per raw, in order.

        All are preprocessed before any is batched; the first that fails ends the request at once. Cancelling
        it stops all of its images that no batch has claimed.

        Raises ``InvalidInput`` for an image that ``preprocess`` refuses or that costs more than a batch may
        hold; ``EncoderFailed`` where the backend failed or broke its contract; ``EncoderUnavailable`` before
        load and after shutdown. Errors name an image by its position: "image 2 of 3".
        """
        if isinstance(raws, (str, bytes)):
            raise TypeError(f"encode() takes a sequence of raws, got one {type(raws).__name__}")
        with self._lock:
            batcher, pool = self._batcher, self._pool
            if batcher is None:
                raise EncoderUnavailable(
                    "encode() called after shutdown()" if self._loaded else "encode() called before load()"
                )
            if pool is not None and len(raws):
                preparation = _Preparation(self._backend.preprocess, self._limits, raws)
                self._preparing.add(preparation)
        if pool is None or not len(raws):
            return await batcher.submit(list(raws))  # type: ignore[arg-type]  # its raws are its items
        del raws  # a traceback through here must not keep them
        try:
            preparation.begin(pool)
            ready = await preparation.done()
        finally:
            with self._lock:
                self._preparing.discard(preparation)
            del preparation
        items = [image.item for image in ready]
        costs = [image.cost for image in ready]
        keys = [image.key for image in ready]
        del ready
        request = batcher.submit(items, costs, keys)
        del items
        return await request

    # ---- within

    def _prepare_to_load(self, model_id: str) -> ThreadedMicroBatcher[ItemT, ArtifactT]:
        backend = self._backend
        with self._lock:
            if self._loaded:
                raise RuntimeError("AsyncVisionEncoder.load() called twice")
            batcher: ThreadedMicroBatcher[ItemT, ArtifactT] = ThreadedMicroBatcher(
                backend.forward_batch,
                max_batch_cost=backend.max_batch_cost,
                max_batch_items=backend.max_batch_items,
                buckets=backend.buckets,
                on_start=lambda: backend.build(model_id),
                on_stop=backend.close,
                max_wait_s=self._max_wait_s,
                observer=self._observer,
                name=self._name,
                join_timeout_s=self._join_timeout_s,
            )
            self._limits = Limits(
                backend.max_batch_cost, backend.max_batch_items, tuple(backend.buckets or ())
            )
            if self._threads:
                pool = Pool(self._threads, f"{self._name}-preprocess", grace_s=self._join_timeout_s)
                pool.start()
                self._pool = pool
            self._loaded = True
            self._batcher = batcher
        return batcher

    def _detach(self) -> tuple[ThreadedMicroBatcher[ItemT, ArtifactT] | None, Pool | None]:
        with self._lock:
            batcher, pool, preparing = self._batcher, self._pool, self._preparing
            self._batcher, self._pool, self._preparing = None, None, set()
        for preparation in preparing:
            preparation.end(EncoderUnavailable("shut down while the request was being preprocessed"))
        if pool is not None:
            pool.close()
        return batcher, pool

    def _reap(self, pool: Pool) -> None:
        if pool.stopped.done():
            pool.join()
        else:
            logger.warning(
                "%s: a preprocess still runs %g s after shutdown began (join_timeout_s); leaving it",
                self._name,
                self._join_timeout_s,
            )


def _threads(backend: VisionEncoderBackend[Any, Any, Any], override: int | None) -> int:
    """How many threads preprocess; 0 for a backend that has no such phase."""
    wanted = backend.preprocess_concurrency if override is None else override
    if wanted:
        positive_int(wanted, "preprocess_concurrency must be None or an int >= 0")
    if type(backend).preprocess is VisionEncoderBackend.preprocess:
        return 0
    if wanted == 0:
        raise ValueError(
            f"preprocess_concurrency is 0, but {type(backend).__name__} overrides preprocess, "
            "which would never run: leave it None or give it threads"
        )
    return wanted or _cores()


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _blame(error: BaseException, what: str) -> RetinueError:
    """The caller's own error for what ``preprocess`` raised."""
    blamed: RetinueError
    if isinstance(error, InvalidInput):
        blamed = InvalidInput(f"{what}: {error}")
    elif isinstance(error, RetinueError):
        return error
    elif isinstance(error, (ValueError, TypeError)):
        blamed = InvalidInput(f"{what} was refused by preprocess")
        if hasattr(blamed, "add_note"):  # for the log and the debugger; clients see the message alone
            blamed.add_note(describe(error))
    else:
        blamed = EncoderFailed(f"{what}: preprocess raised {describe(error)}")
    blamed.__cause__ = error
    return blamed


class _Preparation:
    """The preprocessing of one request: all of its images, or the first error.

    Its images are jobs of the pool. Whoever finishes the last, or fails first, wakes the request: one call
    into its event loop. Jobs that have not begun when the request ends do nothing.
    """

    def __init__(
        self,
        preprocess: Callable[[Any], Any],
        limits: Limits,
        raws: Sequence[Any],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] = self._loop.create_future()
        self._preprocess = preprocess
        self._limits = limits
        self._lock = threading.Lock()
        self._raws: list[Any] = list(raws)
        self._count = len(self._raws)
        self._ready: list[Any] = [None] * self._count
        self._remaining = self._count  # images still to come; 0 once it has ended
        self._error: RetinueError | None = None

    def begin(self, pool: Pool) -> None:
        """Hand every image to ``pool``, each with a copy of the caller's context."""
        for index in range(self._count):
            pool.submit(partial(contextvars.copy_context().run, self._run, index))

    async def done(self) -> list[Preprocessed[Any]]:
        """What became of the images, in order; raises the error of the first that failed."""
        try:
            await self._future
        except BaseException:
            self.end(None)
            raise
        error, ready = self._error, self._ready
        if error is None:
            return ready
        try:
            raise error
        finally:
            del error, ready, self

    def end(self, error: RetinueError | None) -> None:
        """Stop all that has not begun; with ``error``, wake the request with it. Counts once."""
        with self._lock:
            if not self._remaining:
                return
            self._remaining = 0
            self._raws = []
            self._ready = []
            self._error = error
        if error is not None:
            self._wake()

    def _run(self, index: int) -> None:
        with self._lock:
            if not self._remaining:
                return
            raw, self._raws[index] = self._raws[index], None
        try:
            prepared = self._preprocess(raw)
        except BaseException as error:  # SystemExit too: the process is not a backend's to end
            forget_frames(error)
            self.end(_blame(error, f"image {index + 1} of {self._count}"))
            return
        finally:
            del raw
        try:
            prepared = self._checked(prepared, index)
        except RetinueError as error:
            self.end(error)
            return
        with self._lock:
            if not self._remaining:
                return
            self._ready[index] = prepared
            self._remaining -= 1
            last = not self._remaining
        if last:
            self._wake()

    def _checked(self, prepared: Any, index: int) -> Preprocessed[Any]:
        """``prepared``, with a cost that a batch can hold and a key that can be compared."""
        what = f"image {index + 1} of {self._count}"
        if not isinstance(prepared, Preprocessed):
            raise EncoderFailed(f"{what}: preprocess must return Preprocessed, got {type(prepared).__name__}")
        try:
            positive_int(prepared.cost, "preprocess gave a cost that is no positive int")
            hash(prepared.key)
        except (TypeError, ValueError) as error:
            raise EncoderFailed(f"{what}: {error}") from None
        cost = self._limits.admit(prepared.cost, index, self._count, "image")
        return Preprocessed(prepared.item, cost, prepared.key)

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: its caller is gone
            self._loop.call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        if not self._future.done():
            self._future.set_result(None)
