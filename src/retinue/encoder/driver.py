"""``AsyncVisionEncoder``: a backend, driven from asyncio.

Thread rules
    The backend's ``build``, ``forward_batch`` and ``close`` run on the batcher's thread, ``preprocess`` on
    the pool's; nothing of the backend ever runs on an event loop.
    ``_lock`` guards ``_life``, ``_batcher``, ``_pool``, ``_ending`` and ``_preparing``; it is not held while
    the backend or an event loop's callback runs. It is re-entrant, because the garbage collector may end an
    abandoned ``encode`` in a thread that holds it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from retinue.batching import Observer, Pending, ThreadedMicroBatcher
from retinue.batching.batcher import forward_timeout, pending_bound, rebuild_bound
from retinue.batching.outcome import Words, log_error
from retinue.batching.planner import Limits, positive_int
from retinue.encoder.backend import ArtifactT, ItemT, Preprocessed, RawT, VisionEncoderBackend
from retinue.encoder.cache import Cached
from retinue.encoder.contract import CheckedBackend
from retinue.encoder.flights import Flights
from retinue.encoder.pool import Pool
from retinue.encoder.preparation import Preparation
from retinue.encoder.sharing import Sharing
from retinue.errors import EncoderUnavailable

logger = logging.getLogger("retinue")

SelfT = TypeVar("SelfT", bound="AsyncVisionEncoder[Any, Any, Any]")


_WORDS = Words(item="image", call="forward_batch")

_NOTHING = Pending(items=0, cost=0, oldest_wait_s=None, running_cost=0, running_s=None)


class _Life(Enum):
    """Where in its life an encoder is: what ``encode`` refuses to be called at, except for ``LOADED``."""

    NEW = "before load()"
    LOADING = "before load() was done"
    LOADED = "while loaded"
    FAILED = "after load() failed"
    CLOSED = "after shutdown()"


@runtime_checkable
class PreprocessObserver(Protocol):
    """An observer that also hears how long each ``preprocess`` took; on pool threads, several at once."""

    def on_preprocess(self, duration_s: float) -> None:
        """A ``preprocess`` has ended, well or not."""


class AsyncVisionEncoder(Generic[RawT, ItemT, ArtifactT]):
    """Encodes the images of concurrent requests in shared batches, each request getting its own, in order.

    ``async with AsyncVisionEncoder(backend, model_id) as encoder`` builds without blocking the event loop;
    ``load`` and ``shutdown`` do the same for code that is not asynchronous.

    ``preprocess_concurrency``: threads for ``preprocess``, in place of the backend's own choice.
    ``artifact_cache_bytes``: memory for the artifacts of images that were encoded before, and are then not
    preprocessed and encoded again; equal images that are wanted at once are encoded once, too. 0: no cache.
    ``max_wait_s``, ``max_pending_cost``, ``max_rebuilds``, ``rebuild_window_s``, ``forward_timeout_s``,
    ``observer``, ``join_timeout_s``: as for ``ThreadedMicroBatcher``; an observer that is a
    ``PreprocessObserver`` also hears of ``preprocess``.
    """

    def __init__(
        self,
        backend: VisionEncoderBackend[RawT, ItemT, ArtifactT],
        model_id: str | None = None,
        *,
        preprocess_concurrency: int | None = None,
        artifact_cache_bytes: int = 0,
        max_wait_s: float | None = None,
        max_pending_cost: int | None = None,
        max_rebuilds: int = 3,
        rebuild_window_s: float = 300.0,
        forward_timeout_s: float | None = None,
        observer: Observer | None = None,
        name: str = "vision-encoder",
        join_timeout_s: float = 10.0,
    ) -> None:
        self._backend = backend
        self._model_id = model_id
        self._flights = Flights(artifact_cache_bytes) if cache_budget(artifact_cache_bytes) else None
        self._threads = _threads(backend, preprocess_concurrency, has_cache=self._flights is not None)
        self._preprocess: Callable[[RawT], Preprocessed[ItemT]] = backend.preprocess
        if isinstance(observer, PreprocessObserver):
            self._preprocess = _timed(backend.preprocess, observer)
        self._max_wait_s = max_wait_s
        self._max_pending_cost = pending_bound(max_pending_cost)
        self._max_rebuilds = rebuild_bound(max_rebuilds)
        self._rebuild_window_s = rebuild_window_s
        self._forward_timeout_s = forward_timeout(forward_timeout_s)
        self._observer = observer
        self._name = name
        self._join_timeout_s = join_timeout_s
        self._lock = threading.RLock()
        self._life = _Life.NEW
        self._limits = Limits()
        self._batcher: ThreadedMicroBatcher[ItemT, ArtifactT] | None = None
        self._pool: Pool | None = None
        self._preparing: set[Preparation | Sharing] = set()
        # What the first shutdown has begun to end, and a later one may wait for.
        self._ending: tuple[ThreadedMicroBatcher[ItemT, ArtifactT] | None, Pool | None] = (None, None)

    # ---- life

    def load(self, model_id: str) -> None:
        """Build the backend on its thread and wait for it; raises what ``build`` raised.

        ``RuntimeError`` for a second load.
        """
        batcher = self._prepare_to_load(model_id)
        try:
            batcher.start()
            self._open()
        except BaseException as error:
            self._fail()
            self.shutdown(wait=isinstance(error, Exception))  # at Ctrl-C the build may still run
            raise

    async def aload(self, model_id: str) -> None:
        """``load`` without blocking the event loop; a caller who leaves shuts the encoder down."""
        batcher = self._prepare_to_load(model_id)
        try:
            await batcher.astart()
            self._open()
        except Exception:
            self._fail()
            await self.aclose()
            raise
        except BaseException:  # its caller left
            self._fail()
            self.shutdown(wait=False)
            raise

    def shutdown(self, wait: bool = True) -> None:
        """Close the backend on its thread. At any moment, from any thread, any number of times.

        Requests that wait, or are being preprocessed, get ``EncoderUnavailable``; a running forward finishes
        and is delivered. ``wait`` blocks until the backend is closed, for ``join_timeout_s`` at most.
        """
        began_s = time.monotonic()
        batcher, pool = self._close()
        if batcher is not None:
            batcher.shutdown(wait)
        if wait and pool is not None and not pool.owns_current_thread():
            concurrent.futures.wait([pool.stopped], timeout=self._patience_s(began_s))
            self._reap(pool)

    async def aclose(self) -> None:
        """``shutdown`` without blocking the event loop."""
        began_s = time.monotonic()
        batcher, pool = self._close()
        if batcher is not None:
            await batcher.aclose()
        if pool is not None and not pool.owns_current_thread():
            stopped = asyncio.wrap_future(pool.stopped)
            try:
                await asyncio.wait({stopped}, timeout=self._patience_s(began_s))
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

    async def encode(self, raws: Sequence[RawT], *, fresh: bool = False) -> list[ArtifactT]:
        """Encode all of ``raws``; return one artifact per raw, in order, its caller's alone.

        All are preprocessed before any is batched; the first that fails ends the request at once. Cancelling
        it stops all of its images that no batch has claimed and nobody else waits for. ``fresh``: past the
        cache, if there is one.

        Raises ``InvalidInput`` for an image that ``preprocess`` refuses or that costs more than a batch may
        hold; ``EncoderFailed`` where the backend failed or broke its contract; ``Overloaded`` if
        ``max_pending_cost`` leaves no room; ``EncoderUnavailable`` before load and after shutdown. Errors
        name an image by its position: "image 2 of 3".
        """
        if isinstance(raws, (str, bytes)):
            raise TypeError(f"encode() takes a sequence of raws, got one {type(raws).__name__}")
        raws = list(raws)
        with self._lock:
            batcher, pool = self._batcher, self._pool
            if batcher is None or self._life is not _Life.LOADED:
                raise EncoderUnavailable(f"encode() called {self._life.value}")
            if pool is not None and raws:
                work = self._preprocess, self._limits, raws, batcher, pool
                if self._flights is None or fresh:
                    preparation: Preparation | Sharing = Preparation(*work)
                else:
                    preparation = Sharing(self._flights, self._backend.cache_key, *work)
                self._preparing.add(preparation)
                del work
        if pool is None or not raws:
            request = batcher.submit(raws)  # type: ignore[arg-type]  # its raws are its items
            del raws  # a traceback through here must not keep them
            return await request
        del raws
        try:
            return await preparation.run()
        finally:
            with self._lock:
                self._preparing.discard(preparation)
            del preparation

    def pending(self) -> Pending:
        """What was batched and is not answered yet; images in ``preprocess`` are not among it."""
        with self._lock:
            batcher = self._batcher
        return _NOTHING if batcher is None else batcher.pending()

    def cached(self) -> Cached:
        """What the cache holds and has done; all 0 without one."""
        return Cached() if self._flights is None else self._flights.figures()

    # ---- within

    def _prepare_to_load(self, model_id: str) -> ThreadedMicroBatcher[ItemT, ArtifactT]:
        backend = self._backend
        with self._lock:
            if self._life is not _Life.NEW:
                raise RuntimeError("AsyncVisionEncoder.load() called twice")
            checked = CheckedBackend(backend)
            batcher: ThreadedMicroBatcher[ItemT, ArtifactT] = ThreadedMicroBatcher(
                checked.forward_batch,
                max_batch_cost=backend.max_batch_cost,
                max_batch_items=backend.max_batch_items,
                buckets=backend.buckets,
                on_start=partial(checked.build, model_id),
                on_stop=backend.close,
                max_wait_s=self._max_wait_s,
                max_pending_cost=self._max_pending_cost,
                may_repeat=backend.may_repeat,
                is_out_of_memory=backend.is_out_of_memory,
                release_memory=backend.release_memory,
                is_fatal=backend.is_fatal,
                max_rebuilds=self._max_rebuilds,
                rebuild_window_s=self._rebuild_window_s,
                forward_timeout_s=self._forward_timeout_s,
                observer=self._observer,
                name=self._name,
                join_timeout_s=self._join_timeout_s,
                _words=_WORDS,
            )
            self._limits = Limits(
                backend.max_batch_cost, backend.max_batch_items, tuple(backend.buckets or ())
            )
            if self._threads:
                pool = Pool(self._threads, f"{self._name}-preprocess", grace_s=self._join_timeout_s)
                pool.start()
                self._pool = pool
            self._life = _Life.LOADING
            self._batcher = batcher
        return batcher

    def _open(self) -> None:
        """Take requests from now on; ``EncoderUnavailable`` if it was shut down meanwhile."""
        with self._lock:
            if self._life is not _Life.LOADING:
                raise EncoderUnavailable("shut down during load()")
            self._life = _Life.LOADED

    def _fail(self) -> None:
        with self._lock:
            if self._life is _Life.LOADING:
                self._life = _Life.FAILED

    def _close(self) -> tuple[ThreadedMicroBatcher[ItemT, ArtifactT] | None, Pool | None]:
        """Take no more requests, end those that are being preprocessed; return what else is to be ended."""
        with self._lock:
            preparing = list(self._preparing)
            if self._batcher is not None:
                self._ending = self._batcher, self._pool
            self._batcher = self._pool = None
            batcher, pool = self._ending
            if self._life in (_Life.LOADING, _Life.LOADED):
                self._life = _Life.CLOSED
        for preparation in preparing:
            preparation.end(EncoderUnavailable("shut down while the request was being preprocessed"))
        if pool is not None:
            pool.close()
        if self._flights is not None:
            self._flights.close()
        return batcher, pool

    def _patience_s(self, began_s: float) -> float:
        """How much longer a shutdown that began then may wait."""
        return max(0.0, began_s + self._join_timeout_s - time.monotonic())

    def _reap(self, pool: Pool) -> None:
        if pool.stopped.done():
            pool.join()
        else:
            logger.warning(
                "%s: a preprocess still runs %g s after shutdown began (join_timeout_s); leaving it",
                self._name,
                self._join_timeout_s,
            )


def _timed(
    preprocess: Callable[[RawT], Preprocessed[ItemT]], observer: PreprocessObserver
) -> Callable[[RawT], Preprocessed[ItemT]]:
    def timed(raw: RawT) -> Preprocessed[ItemT]:
        began_s = time.monotonic()
        try:
            return preprocess(raw)
        finally:
            del raw
            try:
                observer.on_preprocess(time.monotonic() - began_s)
            except Exception as error:
                log_error("an observer raised", error)

    return timed


def cache_budget(value: int) -> int:
    """``artifact_cache_bytes``, checked."""
    return 0 if value == 0 else positive_int(value, "artifact_cache_bytes must be an int >= 0")


def _threads(backend: VisionEncoderBackend[Any, Any, Any], override: int | None, *, has_cache: bool) -> int:
    """How many threads preprocess, and look images up; 0 where there is neither to be done."""
    wanted = backend.preprocess_concurrency if override is None else override
    if wanted:
        positive_int(wanted, "preprocess_concurrency must be None or an int >= 0")
    if type(backend).preprocess is VisionEncoderBackend.preprocess:
        return (wanted or _cores()) if has_cache else 0
    if wanted == 0:
        raise ValueError(
            f"preprocess_concurrency is 0, but {type(backend).__name__} overrides preprocess, "
            "which would never run: leave it None or give it threads"
        )
    return wanted or _cores()


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
