"""A server as a process: signals, grace, and how it ends."""

from __future__ import annotations

import asyncio
import signal
import socket
import time

import pytest

from .processes import Process, program
from .test_middleware import CHAT, chat, image


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
