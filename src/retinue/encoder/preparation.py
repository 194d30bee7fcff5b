"""The preprocessing of one request: of all its images before any is batched.

Thread rules
    ``run`` belongs to the event loop that awaits it; ``end`` may be called from any thread.
    ``_lock`` guards all fields. It is re-entrant, because the garbage collector may end an abandoned
    ``encode`` in a thread that holds it; it is not held while the backend, the batcher or an event loop's
    callback runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import copy
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from retinue.batching import ThreadedMicroBatcher
from retinue.batching.outcome import describe, forget_frames
from retinue.batching.planner import Limits, positive_int
from retinue.batching.request import Request
from retinue.encoder.backend import Preprocessed
from retinue.encoder.pool import Pool
from retinue.errors import EncoderFailed, InvalidInput, RetinueError

__all__ = ["Preparation", "blame", "checked"]


class Preparation:
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
        pool: Pool,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] = self._loop.create_future()
        self._preprocess = preprocess
        self._limits = limits
        self._batcher = batcher
        self._pool = pool
        self._lock = threading.RLock()
        self._raws = raws
        self._count = len(self._raws)
        self._ready: list[Any] = [None] * self._count
        self._remaining = self._count  # images still to come; 0 once it has ended or is batched
        self._request: Request | None = None  # once it is about to be batched
        self._left = False  # its caller has
        self._error: BaseException | None = None

    async def run(self) -> list[Any]:
        """What becomes of the images, in order; raises the error of the first that fails.

        Each is a job of the pool, in a copy of the caller's context.
        """
        try:
            for index in range(self._count):
                self._pool.submit(partial(contextvars.copy_context().run, self._do, index))
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
            self.end(blame(error, index, self._count))
            return
        finally:
            del raw
        try:
            prepared = checked(prepared, self._limits, index, self._count)
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

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: its caller is gone
            self._loop.call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        if not self._future.done():
            self._future.set_result(None)


def blame(error: BaseException, index: int, count: int, call: str = "preprocess") -> RetinueError:
    """The caller's own error for what ``preprocess``, or another method of the backend, raised."""
    what = f"image {index + 1} of {count}"
    blamed: RetinueError
    if isinstance(error, InvalidInput):
        blamed = InvalidInput(f"{what}: {_words(error, call)}", position=index)
    elif isinstance(error, RetinueError):
        try:
            blamed = copy.copy(error)
        except Exception:  # an author's own, made of more than its ``args``
            blamed = EncoderFailed(f"{what}: {call} raised {describe(error)}", position=index)
    elif isinstance(error, (ValueError, TypeError)):
        blamed = InvalidInput(f"{what} was refused by {call}", position=index)
        if hasattr(blamed, "add_note"):  # for the log and the debugger; clients see the message alone
            blamed.add_note(describe(error))
    else:
        blamed = EncoderFailed(f"{what}: {call} raised {describe(error)}", position=index)
    blamed.__cause__ = error
    return blamed


def _words(error: InvalidInput, call: str) -> str:
    """What its author wrote for the caller, or our words where there are none or ``__str__`` raises."""
    words = ""
    with contextlib.suppress(Exception):
        words = str(error)
    return words or f"refused by {call}"


def checked(prepared: Any, limits: Limits, index: int, count: int) -> Preprocessed[Any]:
    """``prepared``, with a cost that a batch can hold and a key that can be compared."""
    what = f"image {index + 1} of {count}"
    if not isinstance(prepared, Preprocessed):
        kind = type(prepared).__name__
        raise EncoderFailed(f"{what}: preprocess must return Preprocessed, got {kind}", position=index)
    try:
        positive_int(prepared.cost, "preprocess gave a cost that is no positive int")
        hash(prepared.key)
        cost = limits.admit(prepared.cost, index, count, "image")
    except InvalidInput:
        raise
    except (TypeError, ValueError) as error:
        raise EncoderFailed(f"{what}: {error}", position=index) from None
    except BaseException as error:  # out of an author's own ``__index__`` or ``__hash__``
        raise EncoderFailed(f"{what}: its cost or key raised {describe(error)}", position=index) from error
    return Preprocessed(prepared.item, cost, prepared.key)
