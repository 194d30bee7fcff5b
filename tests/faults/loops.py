"""An event loop that runs when a schedule says so, and whose time is the schedule's."""

from __future__ import annotations

import asyncio
import collections
import contextvars
from collections.abc import Callable, Coroutine
from typing import Any


class SimulatedLoop:
    """What asyncio's futures and tasks need of a loop, and no more; hence no ``AbstractEventLoop``.

    ``told``: called whenever another thread calls into it.
    """

    def __init__(self, clock: Callable[[], float], told: Callable[[], object]) -> None:
        self._clock = clock
        self._told = told
        self._ready: collections.deque[asyncio.Handle] = collections.deque()
        self._timers: list[tuple[float, Callable[[], object]]] = []
        self._is_closed = False
        self._is_busy = False
        self.complaints: list[str] = []

    # ---- for asyncio

    def get_debug(self) -> bool:
        return False

    def time(self) -> float:
        return self._clock()

    def is_closed(self) -> bool:
        return self._is_closed

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        if self._is_closed:
            raise RuntimeError("Event loop is closed")
        loop: Any = self
        handle = asyncio.Handle(callback, args, loop, context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        self._told()
        return self.call_soon(callback, *args, context=context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._is_closed:
            self.complaints.append(f"{context['message']} {context.get('exception')!r}")

    # ---- for schedules

    @property
    def is_free(self) -> bool:
        """Whether it is open and inside no callback, so that something can happen on it."""
        return not (self._is_closed or self._is_busy)

    def begin(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task of ``coroutine``, which has run up to its first wait."""
        loop: Any = self
        task = asyncio.Task(coroutine, loop=loop)
        self._run(self._ready.pop())
        return task

    def at(self, when_s: float, callback: Callable[[], object]) -> None:
        """Do ``callback`` in the first turn after that time."""
        self._timers.append((when_s, callback))

    def turn(self) -> bool:
        """Do what is ready or due now; False if there was nothing."""
        if self._timers:
            now_s = self._clock()
            for when_s, callback in [timer for timer in self._timers if timer[0] <= now_s]:
                self._timers.remove((when_s, callback))
                self.call_soon(callback)
        count = len(self._ready)
        for _ in range(count):
            if self._ready:  # else closed by what it did
                self._run(self._ready.popleft())
        return count > 0

    def within(self, step: Callable[[], object]) -> None:
        """Run ``step`` as the loop would."""
        loop: Any = self
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(loop)
        self._is_busy = True
        try:
            step()
        finally:
            self._is_busy = False
            asyncio._set_running_loop(outer)

    def _run(self, handle: asyncio.Handle) -> None:
        self.within(handle._run)

    def close(self) -> None:
        self._is_closed = True
        self._ready.clear()
        self._timers.clear()
