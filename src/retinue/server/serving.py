"""A ``Stack`` on a socket: signals, grace, and the process's exit.

The first SIGTERM or SIGINT stops accepting, after readiness has gone; what is in flight has ``grace_s`` to
end, then the backend is closed. The second ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn

from retinue.server.protocol import bounded
from retinue.server.stack import Stack

__all__ = ["bind", "listening", "serve", "url_of"]

logger = logging.getLogger("retinue")

_LAST_CHANCE_S = 0.5  # for closing, where the grace is used up


class _Server(uvicorn.Server):
    """Leaves the signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def _server(stack: Stack, grace_s: float) -> _Server:
    config = uvicorn.Config(
        stack.app,
        http=bounded(stack.limits),
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,  # an upstream sends its own
        timeout_graceful_shutdown=math.ceil(grace_s) + 1,  # for the last answers
    )
    return _Server(config)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; ``OSError`` says what is in the way. Port 0 is any that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)


def url_of(listener: socket.socket) -> str:
    """Where it listens."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.asynccontextmanager
async def listening(stack: Stack, listener: socket.socket | None = None) -> AsyncIterator[str]:
    """Build ``stack`` and serve it on this event loop for the length of the ``async with``; gives its URL."""
    listener = listener or bind("127.0.0.1", 0)
    server, url = _server(stack, grace_s=5), url_of(listener)
    serving = asyncio.create_task(server.serve([listener]))
    try:
        await stack.build()
        yield url
    finally:
        stack.drain()
        server.should_exit = True
        await asyncio.wait({serving})
        await stack.close()
    serving.result()


def serve(stack: Stack, name: str, *, host: str, port: int, grace_s: float) -> int:
    """Serve until a signal says to stop, or the backend has failed for good; the process's exit status."""
    try:
        listener = bind(host, port)
    except OSError as error:
        print(f"{name}: cannot listen on {host}:{port}: {error.strerror}", file=sys.stderr)
        return 1
    try:
        import uvloop
    except ModuleNotFoundError:  # Windows
        run = asyncio.run
    else:
        run = uvloop.run
    return run(_serve(stack, name, listener, grace_s))


async def _serve(stack: Stack, name: str, listener: socket.socket, grace_s: float) -> int:
    server, url = _server(stack, grace_s), url_of(listener)
    stopping = _stop_on_signals(stack, server, grace_s)
    serving = asyncio.create_task(server.serve([listener]))
    building = asyncio.create_task(stack.build())
    status = 0
    print(f"{name}: listening on {url}, building", flush=True)
    try:
        await asyncio.wait({serving, building}, return_when=asyncio.FIRST_COMPLETED)
        if building.done() and building.exception() is None:
            print(f"{name}: ready on {url}/v1", flush=True)
            failed = asyncio.wrap_future(stack.readiness.failed)
            ends: set[asyncio.Future[Any]] = {serving}
            if stack.failures.exit_on_failure:
                ends.add(failed)
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done() and not stopping:
                logger.error("%s exits: %s", name, failed.result())
                status = 1
        elif building.done() and not stopping:  # a build that is stopped fails, too
            logger.error("%s could not be built", name, exc_info=building.exception())
            status = 1
    finally:
        server.should_exit = True
        building.cancel()
        await asyncio.wait({serving, building})
        left_s = grace_s - (time.monotonic() - stopping[0]) if stopping else grace_s
        try:
            await asyncio.wait_for(stack.close(), max(left_s, _LAST_CHANCE_S))
        except (TimeoutError, asyncio.TimeoutError):
            logger.warning("%s: something still runs at the end of the grace; leaving it", name)
            _exit_now(status)
    return status


def _stop_on_signals(stack: Stack, server: _Server, grace_s: float) -> list[float]:
    """Handle SIGINT and SIGTERM; when the first came is put into the list that this returns.

    Who is not being answered ``grace_s`` later is told of the shutdown.
    """
    stopping: list[float] = []

    def stop(number: int) -> None:
        if stopping:
            _exit_now(128 + number)
        stopping.append(time.monotonic())
        stack.drain()
        server.should_exit = True
        loop.call_later(grace_s, stack.shut)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    return stopping


def _exit_now(status: int) -> None:
    """End the process though threads may be stuck."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
