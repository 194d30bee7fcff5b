"""Threads for ``preprocess``.

``concurrent.futures.ThreadPoolExecutor`` would do, but for two promises: a job that is stuck must not keep
the interpreter from exiting, and an event loop must be able to wait for the threads' end.

Thread rules
    All methods may be called from any thread. A job runs on one of the pool's threads and must not raise.
    ``_lock`` guards ``_alive``; the queue guards itself.
"""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from collections.abc import Callable

from retinue.batching import exit_hook
from retinue.batching.outcome import log_error

Job = Callable[[], object]


class Pool:
    """A fixed number of threads that run jobs, first come first."""

    def __init__(self, threads: int, name: str, *, grace_s: float) -> None:
        self.stopped: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.stopped.set_running_or_notify_cancel()  # no waiter can cancel it for the others
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._alive = 0
        self._grace_s = grace_s
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=False)
            for number in range(1, threads + 1)
        ]

    def start(self) -> None:
        """Start the threads; RuntimeError if the system has none to give, and then none is left."""
        try:
            for thread in self._threads:
                exit_hook.register(thread, self, grace_s=self._grace_s)
                with self._lock:
                    self._alive += 1
                thread.start()
        except BaseException:
            self._leave()
            self.close()
            raise

    def submit(self, job: Job) -> None:
        """Queue ``job``; after ``close`` it may never run."""
        self._jobs.put(job)

    def close(self) -> None:
        """End the threads once they have run what is queued."""
        for _ in self._threads:
            self._jobs.put(None)

    def join(self) -> None:
        """Wait for the threads' last steps, once ``stopped`` is done; nothing to wait for on one of them."""
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
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
