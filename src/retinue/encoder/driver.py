"""``AsyncVisionEncoder``: a backend, driven from asyncio.

Thread rules
    The backend's ``build``, ``forward_batch`` and ``close`` run on the batcher's thread, ``preprocess`` on
    the pool's; nothing of the backend ever runs on an event loop.
    ``_lock`` guards ``_life``, ``_batcher``, ``_pool``, ``_ending`` and ``_preparing``; each ``_Preparation``
    has one of its own. None is held while the backend or an event loop's callback runs. They are re-entrant,
    because the garbage collector may end an abandoned ``encode`` in a thread that holds them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import copy
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
from retinue.batching.outcome import Words, describe, forget_frames, log_error
from retinue.batching.planner import Limits, positive_int
from retinue.batching.request import Request
from retinue.encoder.backend import ArtifactT, ItemT, Preprocessed, RawT, VisionEncoderBackend
from retinue.encoder.contract import CheckedBackend
from retinue.encoder.pool import Pool
from retinue.errors import EncoderFailed, EncoderUnavailable, InvalidInput, RetinueError

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
        self._threads = _threads(backend, preprocess_concurrency)
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
        self._preparing: set[_Preparation] = set()
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

    async def encode(self, raws: Sequence[RawT]) -> list[ArtifactT]:
        """Encode all of ``raws``; return one artifact per raw, in order.

        All are preprocessed before any is batched; the first that fails ends the request at once. Cancelling
        it stops all of its images that no batch has claimed.

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
                preparation = _Preparation(self._preprocess, self._limits, raws, batcher)
                self._preparing.add(preparation)
        if pool is None or not raws:
            request = batcher.submit(raws)  # type: ignore[arg-type]  # its raws are its items
            del raws  # a traceback through here must not keep them
            return await request
        del raws
        try:
            return await preparation.run(pool)
        finally:
            with self._lock:
                self._preparing.discard(preparation)
            del preparation

    def pending(self) -> Pending:
        """What was batched and is not answered yet; images in ``preprocess`` are not among it."""
        with self._lock:
            batcher = self._batcher
        return _NOTHING if batcher is None else batcher.pending()

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


def _blame(error: BaseException, index: int, count: int) -> RetinueError:
    """The caller's own error for what ``preprocess`` raised."""
    what = f"image {index + 1} of {count}"
    blamed: RetinueError
    if isinstance(error, InvalidInput):
        blamed = InvalidInput(f"{what}: {_words(error)}", position=index)
    elif isinstance(error, RetinueError):
        blamed = copy.copy(error)
    elif isinstance(error, (ValueError, TypeError)):
        blamed = InvalidInput(f"{what} was refused by preprocess", position=index)
        if hasattr(blamed, "add_note"):  # for the log and the debugger; clients see the message alone
            blamed.add_note(describe(error))
    else:
        blamed = EncoderFailed(f"{what}: preprocess raised {describe(error)}")
    blamed.__cause__ = error
    return blamed


def _words(error: InvalidInput) -> str:
    """What its author wrote for the caller, or our words where there are none or ``__str__`` raises."""
    words = ""
    with contextlib.suppress(Exception):
        words = str(error)
    return words or "refused by preprocess"


class _Preparation:
    """The preprocessing of one request: all of its images are batched, or the first error is raised.

    Its images are jobs of the pool. Whoever finishes the last of them hands the request to the batcher, and
    whoever fails first wakes it, so the event loop hears of a request once. Jobs that have not begun when the
    request ends do nothing.
    """

    def __init__(
        self,
        preprocess: Callable[[Any], Any],
        limits: Limits,
        raws: list[Any],
        batcher: ThreadedMicroBatcher[Any, Any],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] = self._loop.create_future()
        self._preprocess = preprocess
        self._limits = limits
        self._batcher = batcher
        self._lock = threading.RLock()
        self._raws = raws
        self._count = len(self._raws)
        self._ready: list[Any] = [None] * self._count
        self._remaining = self._count  # images still to come; 0 once it has ended or is batched
        self._request: Request | None = None  # once it is about to be batched
        self._left = False  # its caller has
        self._error: BaseException | None = None

    async def run(self, pool: Pool) -> list[Any]:
        """What becomes of the images, in order; raises the error of the first that fails.

        Each is a job of ``pool``, in a copy of the caller's context.
        """
        try:
            for index in range(self._count):
                pool.submit(partial(contextvars.copy_context().run, self._do, index))
            await self._future
        except GeneratorExit:
            self._leave(self._batcher.abandon)
            raise
        except BaseException:
            self._leave(self._batcher.withdraw)
            raise
        request, self._request = self._request, None
        error: BaseException | None = self._error
        if error is None and request is not None:
            error = request.error
            if error is None:
                return request.results
        assert error is not None
        self._error = None  # its traceback leads to here, and a cycle would keep it
        try:
            raise error
        finally:
            del error, request, self

    def end(self, error: BaseException | None) -> None:
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

    def _leave(self, withdraw: Callable[[Request], None]) -> None:
        self.end(None)
        with self._lock:
            self._left = True
            request, self._request = self._request, None
        if request is not None:
            withdraw(request)

    def _do(self, index: int) -> None:
        with self._lock:
            if not self._remaining:
                return
            raw, self._raws[index] = self._raws[index], None
        try:
            prepared = self._preprocess(raw)
        except BaseException as error:  # SystemExit too: the process is not a backend's to end
            forget_frames(error)
            self.end(_blame(error, index, self._count))
            return
        finally:
            del raw
        try:
            prepared = self._checked(prepared, index)
        except RetinueError as error:
            forget_frames(error)
            del prepared
            self.end(error)
            return
        with self._lock:
            if not self._remaining:
                return
            self._ready[index] = prepared
            self._remaining -= 1
            if self._remaining:
                return
            ready, self._ready = self._ready, []
            self._request = request = Request.to_wake(self._future)
        del prepared  # a traceback through the next line must not keep it
        self._batch(request, ready)

    def _batch(self, request: Request, ready: list[Preprocessed[Any]]) -> None:
        """Hand what is ready to the batcher, outside of the lock, for the batcher has one of its own."""
        try:
            self._batcher.enqueue(
                request,
                [image.item for image in ready],
                [image.cost for image in ready],
                [image.key for image in ready],
            )
        except BaseException as error:
            forget_frames(error)
            self._error = error
            self._wake()
            return
        finally:
            ready.clear()  # the caller's, too
        with self._lock:
            left = self._left
        if left:  # before the batcher knew the request
            self._batcher.withdraw(request)

    def _checked(self, prepared: Any, index: int) -> Preprocessed[Any]:
        """``prepared``, with a cost that a batch can hold and a key that can be compared."""
        what = f"image {index + 1} of {self._count}"
        if not isinstance(prepared, Preprocessed):
            raise EncoderFailed(f"{what}: preprocess must return Preprocessed, got {type(prepared).__name__}")
        try:
            positive_int(prepared.cost, "preprocess gave a cost that is no positive int")
            hash(prepared.key)
            cost = self._limits.admit(prepared.cost, index, self._count, "image")
        except InvalidInput:
            raise
        except (TypeError, ValueError) as error:
            raise EncoderFailed(f"{what}: {error}") from None
        except BaseException as error:  # out of an author's own ``__index__`` or ``__hash__``
            raise EncoderFailed(f"{what}: its cost or key raised {describe(error)}") from error
        return Preprocessed(prepared.item, cost, prepared.key)

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: its caller is gone
            self._loop.call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        if not self._future.done():
            self._future.set_result(None)
