"""A text on its way to one event loop, piece by piece."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from retinue.decoders.generation import Generation

__all__ = ["Listener", "TextStream"]


@dataclass(frozen=True)
class Listener:
    """Where a streamed text goes, piece by piece; None is its end."""

    loop: asyncio.AbstractEventLoop
    pieces: asyncio.Queue[str | None]


class TextStream(AsyncIterator[str]):
    """The pieces of one text as they are settled; their concatenation is ``generation.text``.

    A piece never ends within a character or within what may become a stop string. Leave the ``async for``
    early through ``async with`` or ``aclose``; a stream that is merely dropped also stops, when Python
    collects it.
    """

    def __init__(
        self, listener: Listener, run: Coroutine[Any, Any, Generation], leave: Callable[[], None]
    ) -> None:
        self._leave_draft = leave
        self._pieces = listener.pieces
        self._generation: Generation | None = None
        self._ended = False
        self._task = listener.loop.create_task(run)
        # Not a bound method: the task must not keep the stream, or it would never be collected.
        self._task.add_done_callback(functools.partial(_end, listener.pieces))

    @property
    def generation(self) -> Generation:
        """The finished generation, once the iteration has ended by itself; ``RuntimeError`` before."""
        if self._generation is None:
            raise RuntimeError("the text is not finished")
        return self._generation

    def __aiter__(self) -> TextStream:
        return self

    async def __anext__(self) -> str:
        if self._ended:
            raise StopAsyncIteration
        try:
            piece = await self._pieces.get()
        except BaseException:
            self._leave()
            raise
        if piece is not None:
            return piece
        self._ended = True
        if not self._task.cancelled():
            self._generation = await self._task  # it is done; raises the request's error
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Stop the text here: it gets no further token."""
        self._leave()
        await asyncio.wait({self._task})

    async def __aenter__(self) -> TextStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._leave_draft()

    def _leave(self) -> None:
        self._ended = True
        self._task.cancel()  # which leaves the draft, too


def _end(pieces: asyncio.Queue[str | None], task: asyncio.Task[Generation]) -> None:
    # The actor's pieces were scheduled on this loop before the result was: all lie in the queue by now.
    pieces.put_nowait(None)
    if not task.cancelled():
        task.exception()  # seen, even if nobody iterates to the end
