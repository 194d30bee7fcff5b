"""Our life lies within the app's: it begins before the server listens, and ends after the app has."""

from __future__ import annotations

import asyncio
import logging

import pytest
from starlette.types import Message, Receive, Scope, Send

from retinue.server.lifespan import live_within

from .asgi import SOON_S


class Server:
    """A server's side of the lifespan protocol, and an app's; ``events`` is what happened, in order."""

    def __init__(self, *, start: Exception | None = None, park: bool = False) -> None:
        self.events: list[str] = []
        self.parked = asyncio.Event()
        self._start, self._park = start, park
        self._to_app: asyncio.Queue[Message] = asyncio.Queue()
        self._answers: asyncio.Queue[Message] = asyncio.Queue()
        self.living = asyncio.create_task(
            live_within(
                self._app,
                {"type": "lifespan"},
                self._to_app.get,
                self._answers.put,
                start=self._begin,
                stop=self._end,
            )
        )

    async def answer(self) -> Message:
        return await asyncio.wait_for(self._answers.get(), SOON_S)

    def say(self, what: str) -> None:
        self._to_app.put_nowait({"type": f"lifespan.{what}"})

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert await receive() == {"type": "lifespan.startup"}
        self.events.append("app started")
        await send({"type": "lifespan.startup.complete"})
        assert await receive() == {"type": "lifespan.shutdown"}
        self.events.append("app stopped")
        await send({"type": "lifespan.shutdown.complete"})

    async def _begin(self) -> None:
        self.events.append("start")
        if self._start is not None:
            raise self._start
        if self._park:
            self.parked.set()
            await asyncio.Event().wait()

    async def _end(self) -> None:
        self.events.append("stop")


async def test_ours_begins_before_the_server_listens_and_ends_after_the_app() -> None:
    server = Server()
    server.say("startup")
    assert await server.answer() == {"type": "lifespan.startup.complete"}
    assert server.events == ["app started", "start"]
    server.say("shutdown")
    assert await server.answer() == {"type": "lifespan.shutdown.complete"}
    assert server.events == ["app started", "start", "app stopped", "stop"]
    await server.living


async def test_what_start_raises_is_the_servers_reason_not_to_listen(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = Server(start=ValueError("no such model"))
    server.say("startup")
    failed = {"type": "lifespan.startup.failed", "message": "retinue: no such model"}
    assert await server.answer() == failed
    assert server.events == ["app started", "start", "stop"]
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    server.living.cancel()


async def test_a_server_that_is_told_to_stop_does_not_wait_for_the_start() -> None:
    server = Server(park=True)
    server.say("startup")
    await asyncio.wait_for(server.parked.wait(), SOON_S)
    server.say("shutdown")
    assert await server.answer() == {"type": "lifespan.startup.complete"}
    assert await server.answer() == {"type": "lifespan.shutdown.complete"}
    assert server.events == ["app started", "start", "app stopped", "stop"]
    await server.living
