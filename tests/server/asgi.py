"""Calls ASGI apps by hand: what the tests of single layers of the server share."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: A bound for waits that end at once when all is well.
SOON_S = 20.0


@dataclass
class Reply:
    """What an app answered."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def json(self) -> Any:
        return orjson.loads(self.body)


class Client:
    """One request to an app, whose client can leave."""

    def __init__(
        self,
        path: str,
        body: bytes | Sequence[bytes] = b"",
        *,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.reply = Reply()
        self._chunks = [body] if isinstance(body, bytes) else list(body)
        self._left = asyncio.Event()
        pairs = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
        self.scope: Scope = {"type": "http", "method": method, "path": path, "headers": pairs}

    def leave(self) -> None:
        """Close the connection."""
        self._left.set()

    async def call(self, app: ASGIApp) -> Reply:
        """Let ``app`` answer."""
        await asyncio.wait_for(app(self.scope, self._receive, self._send), SOON_S)
        return self.reply

    async def _receive(self) -> Message:
        if self._chunks:
            chunk = self._chunks.pop(0)
            return {"type": "http.request", "body": chunk, "more_body": bool(self._chunks)}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            assert self.reply.status is None, "answered twice"
            self.reply.status = message["status"]
            self.reply.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.reply.body += message.get("body", b"")


async def call(app: ASGIApp, path: str, body: bytes = b"", **options: Any) -> Reply:
    """One request to ``app``, whose client stays."""
    return await Client(path, body, **options).call(app)


class Mirror:
    """An app that answers 200 with the body that it got, and remembers its requests."""

    def __init__(self) -> None:
        self.scopes: list[Scope] = []
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for moment in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{moment}.complete"})
            return
        body, more = b"", True
        while more:
            message = await receive()
            body += message["body"]
            more = message["more_body"]
        self.scopes.append(scope)
        self.bodies.append(body)
        await answer(send, body)


async def answer(send: Send, body: bytes, status: int = 200) -> None:
    """Answer at once."""
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": body})
