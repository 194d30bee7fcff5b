"""One HTTP request from the server's side: its body within a bound, and whether its client is still there.

ASGI says that a client has left by what ``receive`` returns next, so somebody must be receiving while we
work. ``Connection`` is that somebody, and gives on to the app behind what it took on its behalf.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.types import Message, Receive, Scope

from retinue.server.interruption import Interruption

__all__ = ["BodyTooLarge", "ClientLeft", "Connection"]

T = TypeVar("T")


class ClientLeft(Exception):
    """The client has closed its connection: there is nobody to answer."""


class BodyTooLarge(Exception):
    """The body is larger than the server takes."""


class Connection:
    """Reads a request's body once; then watches for its client's leaving."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._scope = scope
        self._receive = receive
        self._next: asyncio.Task[Message] | None = None

    async def body(self, max_bytes: int, reserve: Callable[[int], None] | None = None) -> bytes:
        """The whole body. ``BodyTooLarge`` as soon as that is known; ``ClientLeft`` if it does not end.

        ``reserve`` is told of the bytes as they come, and may raise.
        """
        if (announced := self._content_length()) is not None and announced > max_bytes:
            raise BodyTooLarge
        chunks: list[bytes] = []
        size, more = 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if reserve is not None:
                reserve(len(chunks[-1]))
            if size > max_bytes:
                raise BodyTooLarge
            more = message.get("more_body", False)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def unless_left(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``; if the client leaves first, ``work`` is cancelled, and ``ClientLeft``.

        Only after ``body``: what a client sends next is that it has left.
        """
        leaving = self._leaving()
        with Interruption() as interruption:
            leaving.add_done_callback(interruption.interrupt)
            try:
                return await work
            finally:
                leaving.remove_done_callback(interruption.interrupt)
        raise ClientLeft

    def replay(self, body: bytes) -> Receive:
        """A ``receive`` for the app behind: ``body`` first, and then what the client really does."""
        given = [body]

        async def receive() -> Message:
            if given:
                return {"type": "http.request", "body": given.pop(), "more_body": False}
            return await asyncio.shield(self._leaving())

        return receive

    def close(self) -> None:
        """Stop watching."""
        if self._next is not None:
            self._next.cancel()

    def _leaving(self) -> asyncio.Task[Message]:
        if self._next is None:
            self._next = asyncio.ensure_future(self._until_left())
            self._next.add_done_callback(_see)
        return self._next

    async def _until_left(self) -> Message:
        while (message := await self._receive())["type"] != "http.disconnect":
            pass
        return message

    def _content_length(self) -> int | None:
        for name, value in self._scope["headers"]:
            if name == b"content-length" and value.isdigit():
                return int(value[:20])  # enough digits to be too large
        return None


def _see(task: asyncio.Task[Any]) -> None:
    """Look at the error, if any, which the event loop would otherwise log as never retrieved."""
    if not task.cancelled():
        task.exception()
