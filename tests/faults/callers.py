"""Callers of ``submit``, as schedules have them come, leave and hear."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from retinue.errors import DeadlineExceeded, EncoderFailed, EncoderUnavailable

from .loops import SimulatedLoop
from .model import Outcome, Request

_OUTCOMES: dict[type[BaseException], Outcome] = {
    EncoderFailed: "failed",
    EncoderUnavailable: "unavailable",
    DeadlineExceeded: "deadline",
}


class Caller:
    """One ``submit``, run up to its first wait: a task of its loop, or a bare coroutine."""

    def __init__(
        self, request: Request, loop: SimulatedLoop, coroutine: Coroutine[Any, Any, list[Any]], *, bare: bool
    ) -> None:
        self.request = request
        self.loop = loop
        self.is_bare = bare
        self.is_done = False
        self.is_compared = False  # with the books
        self.results: list[Any] = []
        self.error: BaseException | None = None
        self._coroutine = coroutine
        self._task: asyncio.Task[None] | None = None
        if bare:
            loop.within(self._go_on)
        else:
            self._task = loop.begin(self._wait())

    def leave(self) -> None:
        """Cancel it; a bare one is closed, as the garbage collector closes it."""
        if self._task is not None:
            self._task.cancel()
        else:
            self._coroutine.close()
            self._end(asyncio.CancelledError())

    def outcome(self) -> Outcome:
        """How it ended; ``AssertionError`` for anything that no caller may get."""
        if self.error is None:
            numbers = [answer.number for answer in self.results]
            assert numbers == [item.number for item in self.request.items], f"{self.request} got {numbers}"
            return "ok"
        if isinstance(self.error, asyncio.CancelledError):
            return "left"
        assert type(self.error) in _OUTCOMES, f"{self.request} got {self.error!r}"
        if isinstance(self.error, EncoderFailed):
            self._check_blame(self.error)
        return _OUTCOMES[type(self.error)]

    def _check_blame(self, error: EncoderFailed) -> None:
        """It names an item that was in a failed call, and what that call raised."""
        items = self.request.items
        if error.position is not None:
            item = items[error.position]
            assert item.has_failed, f"item {item} is blamed: {error!r}"
        held = getattr(error.__cause__, "held", None)
        if held is not None and not any(item.search and item.search.is_spent for item in items):
            assert held & {item.number for item in items}, f"{self.request} is blamed for {sorted(held)}"

    async def _wait(self) -> None:
        try:
            self.results = await self._coroutine
        except BaseException as error:
            self._end(error)
        self.is_done = True

    def _go_on(self, _: object = None) -> None:
        if self.is_done:
            return
        try:
            future = self._coroutine.send(None)
        except StopIteration as stop:
            self.results, self.is_done = stop.value, True
        except Exception as error:
            self._end(error)
        else:
            future._asyncio_future_blocking = False
            future.add_done_callback(self._go_on)

    def _end(self, error: BaseException) -> None:
        self.error, self.is_done = error.with_traceback(None), True
