"""A life of our own within an app's ASGI lifespan: it begins once the app has started, and ends after it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["live_within"]

logger = logging.getLogger("retinue")


async def live_within(
    app: ASGIApp,
    scope: Scope,
    receive: Receive,
    send: Send,
    *,
    start: Callable[[], Awaitable[None]],
    stop: Callable[[], Awaitable[None]],
) -> None:
    """Run the lifespan of ``app`` with ours in it.

    ``start`` runs before the server hears that the app has started, hence before it listens; what it raises
    is the server's reason not to. If the server is told to stop meanwhile, ``start`` is cancelled. ``stop``
    runs after the app has ended, and also where ``start`` has failed.
    """
    coming: list[asyncio.Task[Message]] = []  # what the server says next, once somebody listens

    def listen() -> asyncio.Task[Message]:
        if not coming:
            coming.append(asyncio.ensure_future(_next(receive)))
        return coming[0]

    async def receive_for_app() -> Message:
        message = await listen()
        coming.clear()
        return message

    async def send_for_app(message: Message) -> None:
        if message["type"] == "lifespan.startup.complete":
            starting = asyncio.ensure_future(start())
            await asyncio.wait({starting, listen()}, return_when=asyncio.FIRST_COMPLETED)
            starting.cancel()  # if it has not ended, the server has been told to stop
            await asyncio.wait({starting})
            error = None if starting.cancelled() else starting.exception()
            if error is not None:
                logger.error("the encoder could not be started", exc_info=error)
                await stop()
                message = {"type": "lifespan.startup.failed", "message": f"retinue: {error}"}
        elif message["type"] in ("lifespan.shutdown.complete", "lifespan.shutdown.failed"):
            await stop()
        await send(message)

    try:
        await app(scope, receive_for_app, send_for_app)
    finally:
        for task in coming:
            task.cancel()


async def _next(receive: Receive) -> Message:
    return await receive()
