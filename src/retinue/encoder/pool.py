"""Threads for what must not run on an event loop: ``preprocess``, and whatever else takes a while.

``concurrent.futures.ThreadPoolExecutor`` would do, but for two promises: a job that is stuck must not keep
the interpreter from exiting, and an event loop must be able to wait for the threads' end.

Thread rules
    All methods may be called from any thread. A job runs on one of the pool's threads and must not raise.
    ``_lock`` guards ``_alive`` and ``_closed``, and that nothing is queued behind the close.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from retinue.batching import exit_hook
from retinue.batching.outcome import forget_frames, log_error
from retinue.errors import EncoderUnavailable

Job = Callable[[], object]
T = TypeVar("T")


class Pool:
    """A fixed number of threads that run jobs, first come first."""

    def __init__(self, threads: int, name: str, *, grace_s: float) -> None:
        self.stopped: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.stopped.set_running_or_notify_cancel()  # no waiter can cancel it for the others
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._alive = 0
        self._closed = False
        self._grace_s = grace_s
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=False)
            for number in range(1, threads + 1)
        ]

    def start(self) -> None:
        """Start the threads; RuntimeError if the system has none to give, and then none is left."""
        try:
            for thread in self._threads:
                with self._lock:
                    self._alive += 1
                exit_hook.register(thread, self, grace_s=self._grace_s)
                thread.start()
        except BaseException as error:
            if isinstance(error, Exception):  # at Ctrl-C it may run, and leave by itself
                self._leave()
            self.close()
            raise

    def submit(self, job: Job) -> None:
        """Queue ``job``; ``EncoderUnavailable`` after ``close``."""
        with self._lock:
            if self._closed:
                raise EncoderUnavailable("the preprocessing threads have been ended")
            self._jobs.put(job)

    async def call(self, function: Callable[[], T]) -> T:
        """What ``function`` returns or raises; it never runs if the caller leaves before it has begun."""
        call = _Call(function)
        self.submit(call.run)
        return await call.outcome()

    def close(self) -> None:
        """End the threads once they have run what is queued."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._jobs.put(None)

    def lose_thread(self) -> None:
        """In a forked child: the threads stayed with the parent, so nobody runs jobs here."""
        self._lock = threading.Lock()  # a thread that is not here may hold the other
        self._closed = True
        if not self.stopped.done():
            self.stopped.set_result(None)

    def join(self) -> None:
        """Wait for the threads' last steps, once ``stopped`` is done."""
        for thread in self._threads:
            if thread.ident is not None:  # None: it could not be started
                thread.join()

    def owns_current_thread(self) -> bool:
        """Whether this is called from within a job."""
        return threading.current_thread() in self._threads

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                self._leave()
                return
            try:
                job()
            except BaseException as error:
                log_error("a preprocessing job raised", error)
            del job  # idle threads keep nothing alive

    def _leave(self) -> None:
        with self._lock:
            self._alive -= 1
            last = not self._alive
        if last:
            self.stopped.set_result(None)


class _Call(Generic[T]):
    """A function for a thread to run, and an event loop to be told.

    As with a request of the batcher, the future only wakes the caller and the outcome lies beside it: a
    StopIteration cannot be put into a future, and nobody may ever retrieve what is.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._function: Callable[[], T] | None = function
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] = self._loop.create_future()
        self._results: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        """On a thread of the pool."""
        function, self._function = self._function, None
        if self._future.cancelled() or function is None:
            return
        try:
            self._results.append(function())
        except BaseException as error:  # SystemExit too: the process is not the function's to end
            forget_frames(error)
            self._error = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: its caller is gone
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        if not self._future.done():
            self._future.set_result(None)

    async def outcome(self) -> T:
        """On the caller's event loop."""
        await self._future
        error, self._error = self._error, None
        if error is None:
            return self._results.pop()
        try:
            raise error
        finally:
            del error, self  # they would close a cycle with the traceback
