"""Both ends of a proxy: real servers on real sockets, rude upstreams, and a client that sees every byte."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp

from retinue.server.proxy import ProxyApp

Handle = Callable[["Wire"], Awaitable[None]]


@dataclass
class Wire:
    """One end of a TCP connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        """Write, and wait until it has left us."""
        self.writer.write(data)
        await self.writer.drain()

    async def until(self, mark: bytes) -> bytes:
        """What arrives, up to ``mark`` and with it."""
        return await self.reader.readuntil(mark)

    async def rest(self) -> bytes:
        """What arrives until the other end closes; a reset counts as closing."""
        received = bytearray()
        with contextlib.suppress(ConnectionError):
            while data := await self.reader.read(65536):
                received += data
        return bytes(received)

    async def close(self) -> None:
        """Close, and wait until it is done."""
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # pytest keeps them


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, http: str = "httptools") -> AsyncIterator[int]:
    """``app`` under uvicorn with ``http`` as its protocol; the port."""
    config = uvicorn.Config(app, lifespan="auto", log_config=None, timeout_graceful_shutdown=5)
    config.http = "h11" if http == "h11" else "httptools"
    server = _Server(config)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        serve = asyncio.ensure_future(server.serve(sockets=[listening]))
        await server.up.wait()
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            await serve


@contextlib.asynccontextmanager
async def upstream(handle: Handle) -> AsyncIterator[str]:
    """A server in which ``handle`` has each connection as it comes; its URL."""
    handling: list[asyncio.Task[None]] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Wire(reader, writer)
        handling.append(asyncio.ensure_future(_handle(wire)))

    async def _handle(wire: Wire) -> None:
        try:
            await handle(wire)
        finally:
            await wire.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await server.wait_closed()
        await asyncio.gather(*handling)


@contextlib.asynccontextmanager
async def dialling(port: int) -> AsyncIterator[Wire]:
    """A client's connection to ``port``."""
    wire = Wire(*await asyncio.open_connection("127.0.0.1", port))
    try:
        yield wire
    finally:
        await wire.close()


@contextlib.asynccontextmanager
async def proxied(handle: Handle, *, http: str = "httptools", base: str = "") -> AsyncIterator[int]:
    """The port of a proxy in front of ``upstream(handle)``."""
    async with upstream(handle) as url, serving(ProxyApp(url + base), http) as port:
        yield port
