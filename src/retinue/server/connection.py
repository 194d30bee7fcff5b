"""One HTTP request from the server's side: its body within bounds, and whether its client is still there.

ASGI says that a client has left by what ``receive`` returns next, so somebody must be receiving while we
work. ``Connection`` is that somebody, and gives on to the app behind what it took on its behalf.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from retinue.server.errors import refusal
from retinue.server.interruption import Interruption

__all__ = ["BodyTooLarge", "ClientLeft", "Connection", "PacedBodies"]

T = TypeVar("T")

_PACE_BYTES = 2**16


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


class PacedBodies:
    """Lets requests through to ``app``; for it, a client whose body comes too slowly has left, and gets 408.

    ``timeout_s``: how long ``app`` may wait in all for the next 64 KiB of a body, or for the rest of it.
    """

    def __init__(self, app: ASGIApp, timeout_s: float) -> None:
        self._app = app
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI interface."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body, began = _Body(receive, self._timeout_s), False

        async def noticed(message: Message) -> None:
            nonlocal began
            began = True
            await send(message)

        try:
            await self._app(scope, body.receive, noticed)
        except Exception:  # some apps raise when their client leaves
            if not body.too_slow or began:
                raise
        if body.too_slow and not began:
            message = f"less than 64 KiB of the body came within client_timeout_s={self._timeout_s:g}"
            response = refusal(408, message, code="too_slow")
            response.headers["Connection"] = "close"
            await response(scope, receive, send)


class _Body:
    """``receive`` with a clock that runs while it waits, up to the body's end."""

    def __init__(self, receive: Receive, timeout_s: float) -> None:
        self.too_slow = False
        self._receive = receive
        self._timeout_s = self._left_s = timeout_s
        self._missing = _PACE_BYTES
        self._ended = False

    async def receive(self) -> Message:
        if self._ended:
            return await self._receive()
        if not self.too_slow:
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            with Interruption() as late:
                timer = loop.call_later(self._left_s, late.interrupt)
                try:
                    return self._counted(await self._receive(), loop.time() - began_s)
                finally:
                    timer.cancel()
            self.too_slow = True
        return {"type": "http.disconnect"}

    def _counted(self, message: Message, waited_s: float) -> Message:
        self._ended = not message.get("more_body", False)
        self._left_s -= waited_s
        self._missing -= len(message.get("body", b""))
        if self._missing <= 0:
            self._left_s, self._missing = self._timeout_s, _PACE_BYTES
        return message
