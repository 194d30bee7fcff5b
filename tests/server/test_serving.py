"""A server as a process: signals, grace, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from .asgi import SOON_S
from .test_middleware import CHAT, chat, image

PROGRAM = Path(__file__).with_name("program.py")


class Process:
    """The program, line by line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.port = 0

    async def line(self, pattern: str) -> re.Match[str]:
        """The next line, which must look like this."""
        assert self._process.stdout is not None
        line = (await asyncio.wait_for(self._process.stdout.readline(), SOON_S)).decode().rstrip()
        match = re.fullmatch(pattern, line)
        assert match, line
        return match

    async def ready(self) -> None:
        """Let it come up."""
        await self.listening()
        await self.line(r"building")
        await self.line(r"program: ready on .*/v1")

    async def listening(self) -> None:
        self.port = int((await self.line(r"program: listening on http://127.0.0.1:(\d+), building"))[1])

    def go(self) -> None:
        """Let it go on where it waits for a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")

    def signal(self, number: int = signal.SIGTERM) -> None:
        self._process.send_signal(number)

    async def end(self) -> int:
        """Its exit status."""
        return await asyncio.wait_for(self._process.wait(), SOON_S)

    async def errors(self) -> str:
        assert self._process.stderr is not None
        return (await asyncio.wait_for(self._process.stderr.read(), SOON_S)).decode()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def ask(self, path: str = "/v1/models", body: bytes = b"") -> bytes:
        """The status line of an answer, and all that follows until the server is done with us."""
        reader, writer = await self.connect()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        answer = await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        return answer


@contextlib.asynccontextmanager
async def program(grace_s: float, *flags: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(PROGRAM),
        str(grace_s),
        *flags,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield Process(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_an_idle_server_ends_at_once_although_a_connection_is_open(number: int) -> None:
    async with program(20) as server:
        await server.ready()
        _, writer = await server.connect()
        began_s = time.monotonic()
        server.signal(number)
        await server.line("closed")
        assert await server.end() == 0
        assert time.monotonic() - began_s < 5
        writer.close()


async def test_what_is_in_flight_is_answered_and_the_backend_closed_once_at_last() -> None:
    async with program(20) as server:
        await server.ready()
        asking = asyncio.create_task(server.ask(CHAT, chat([image(1)])))
        await server.line("forward")
        server.signal()
        while await accepts(server):
            pass
        server.go()
        assert (await asking).startswith(b"HTTP/1.1 200")
        await server.line("closed")
        assert await server.end() == 0


async def accepts(server: Process) -> bool:
    try:
        _, writer = await server.connect()
    except ConnectionError:  # refused, or reset while the listener closed
        return False
    writer.close()
    return True


async def test_a_stuck_forward_ends_with_the_grace() -> None:
    async with program(1, "stuck") as server:
        await server.ready()
        asking = asyncio.create_task(server.ask(CHAT, chat([image(1)])))
        await server.line("forward")
        server.signal()
        assert await server.end() == 0
        await asking  # whatever came, it came to an end
        assert "something still runs at the end of the grace" in await server.errors()


async def test_a_second_signal_ends_it_at_once() -> None:
    async with program(60, "stuck") as server:
        await server.ready()
        asking = asyncio.create_task(server.ask(CHAT, chat([image(1)])))
        await server.line("forward")
        server.signal()
        while await accepts(server):
            pass
        server.signal()
        assert await server.end() == 128 + signal.SIGTERM
        await asking


async def test_a_signal_during_the_build_stops_it() -> None:
    async with program(1, "slow-build") as server:
        await server.listening()
        await server.line("building")
        assert (await server.ask(CHAT, chat([image(1)]))).startswith(b"HTTP/1.1 503")
        server.signal()
        assert await server.end() == 0


async def test_a_build_that_fails_ends_it_with_1() -> None:
    async with program(5, "broken-build") as server:
        await server.listening()
        await server.line("building")
        assert await server.end() == 1
        assert "OSError: no weights" in await server.errors()


async def test_a_port_that_is_taken_is_said_in_a_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with program(5, f"port={port}") as server:
            assert await server.end() == 1
            errors = await server.errors()
    assert errors.startswith(f"program: cannot listen on 127.0.0.1:{port}: Address already in use")
