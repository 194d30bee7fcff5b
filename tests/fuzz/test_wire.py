"""Rude clients on real sockets: nobody holds the server up for longer, or with more, than its limits say."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from starlette.types import Receive, Scope, Send

from retinue.server.limits import ServerLimits
from retinue.server.proxy import ProxyApp
from retinue.server.serving import listening
from retinue.server.stack import Behind, Stack

from ..server.asgi import Mirror
from ..server.backends import Tags
from ..server.proxying import Wire, dialling, upstream
from ..server.test_middleware import CHAT, chat, image
from .clock import forward, later, on_a_clock
from .served import GAUGES

PATIENCE_S = ServerLimits.client_timeout_s
MOST_S = 2 * PATIENCE_S + 5  # for what must have come to its end: once for headers, once for a body


@dataclass
class Server:
    stack: Stack
    port: int

    async def answers(self) -> None:
        """An ordinary request is answered, on a connection of its own."""
        async with dialling(self.port) as wire:
            await wire.send(post(chat([image(1)]), "Connection: close"))
            assert (await wire.rest()).startswith(b"HTTP/1.1 200")

    async def settled(self) -> None:
        """Wait until nothing of a request is left."""
        while any(self.stack.metrics.registry.get_sample_value(name) for name in GAUGES):  # noqa: ASYNC110  # no event tells
            await asyncio.sleep(0)


def post(body: bytes, *headers: str, path: str = CHAT, length: int | None = None) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", *headers]
    if not any("Transfer-Encoding" in header for header in headers):
        lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join([*lines, "", ""]).encode() + body


@contextlib.asynccontextmanager
async def served(app: Mirror | ProxyApp | None = None, **limits: float) -> AsyncIterator[Server]:
    """A server, which at the end must still answer and hold nothing of what went before."""
    options = ServerLimits(**{"max_body_bytes": 2**20, **limits})  # type: ignore[arg-type]  # ints are ints
    behind = Behind(app, close=app.aclose) if isinstance(app, ProxyApp) else Behind(app or Mirror())
    stack = Stack(Tags(), "none", behind, limits=options)
    async with listening(stack) as url:
        server = Server(stack, int(url.rpartition(":")[2]))
        yield server
        await server.settled()
        await server.answers()


def status(reply: bytes) -> bytes:
    """Of the first answer; nothing if the connection broke off, as it may under one who goes on sending."""
    return reply[9:12]


async def going_on(wire: Wire, piece: bytes) -> bytes:
    """Send ``piece`` again and again until the connection ends; what came back."""
    reading = asyncio.ensure_future(wire.rest())
    while not reading.done():
        with contextlib.suppress(ConnectionError):
            await wire.send(piece)
        await asyncio.sleep(0)
    return await reading


# -- headers -------------------------------------------------------------------------------------------


@on_a_clock
async def test_who_says_nothing_is_not_waited_for() -> None:
    async with served() as server, dialling(server.port) as wire:
        assert await later(wire.rest(), MOST_S) == b""


@on_a_clock
async def test_headers_that_stop_half_way_are_not_waited_for() -> None:
    async with served() as server, dialling(server.port) as wire:
        await wire.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-")
        reply = await later(wire.rest(), MOST_S)
        assert status(reply) == b"408"
        assert b"client_timeout_s=30" in reply


@on_a_clock
@pytest.mark.parametrize("piece", [b"a", b"a: b\r\n"], ids=["a byte", "a line"])
async def test_headers_that_drip_on_are_not_waited_for(piece: bytes) -> None:
    async with served(max_header_bytes=2**30) as server, dialling(server.port) as wire:
        await wire.send(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n")
        assert status(await later(going_on(wire, piece), MOST_S)) in (b"408", b"")


@on_a_clock
async def test_empty_lines_between_requests_keep_no_connection_open() -> None:
    async with served() as server, dialling(server.port) as wire:
        await wire.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await wire.until(b'{"status":"ok"}')).startswith(b"HTTP/1.1 200")
        await later(going_on(wire, b"\r\n"), MOST_S)


@on_a_clock
async def test_headers_may_take_their_time_within_the_limit() -> None:
    async with served() as server, dialling(server.port) as wire:
        request = post(chat([image(1)]), "Connection: close")
        await wire.send(request[:20])
        for _ in range(100):  # for the server to have seen them
            await asyncio.sleep(0)
        forward(PATIENCE_S - 2)
        await wire.send(request[20:])
        assert status(await wire.rest()) == b"200"


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /v1/models HTTP/1.1\r\nX: " + b"a" * 2**20,
        b"GET /v1/models HTTP/1.1\r\n" + b"a" * 2**20,
        b"GET /" + b"a" * 2**20,
        b"GET /v1/models HTTP/1.1\r\nX: " + b"a" * 2**20 + b"\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\n" + b"X: a\r\n" * 10_000 + b"\r\n",
        b"GET /v1/models HTTP/1.1\r\n" + b":\r\n" * 400_000 + b"\r\n",
        b"\r\n" * 2**20,
    ],
    ids=["value", "name", "path", "whole line", "10,000 lines", "lines of nothing", "empty lines"],
)
async def test_headers_beyond_the_limit_are_refused_while_they_come(request_: bytes) -> None:
    async with served() as server, dialling(server.port) as wire:
        with contextlib.suppress(ConnectionError):
            await wire.send(request_)
        assert status(await wire.rest()) in (b"431", b"400", b"")


@pytest.mark.parametrize(("lines", "answer"), [(1500, b"200"), (2500, b"431")])
async def test_the_size_of_headers_counts_their_number_too(lines: int, answer: bytes) -> None:
    fields = [f"x-{number:04}: y" for number in range(lines)]  # 39 bytes each, as they count
    async with served() as server, dialling(server.port) as wire:
        await wire.send(post(chat("text"), "Connection: close", *fields))
        assert status(await wire.rest()) == answer


async def test_a_refusal_of_headers_is_an_error_as_clients_read_it() -> None:
    async with served(max_header_bytes=200) as server, dialling(server.port) as wire:
        await wire.send(b"GET /v1/models HTTP/1.1\r\nX: " + b"a" * 200 + b"\r\n\r\n")
        head, _, body = (await wire.rest()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert b"connection: close" in head
    assert body == (
        b'{"error":{"message":"the headers are larger than max_header_bytes=200",'
        b'"type":"invalid_request_error","param":null,"code":"bad_http"}}'
    )


@pytest.mark.parametrize(
    "request_",
    [
        b"\0\1\2\3\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nX\xff: y\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost : x\r\n\r\n",
        post(b"", "Content-Length: -1"),
        post(b"", "Content-Length: 5", "Content-Length: 6"),
        post(b"", "Content-Length: 1e3"),
        post(b"", "Transfer-Encoding: chunked", "Content-Length: 4") + b"0\r\n\r\n",
        post(b"", "Transfer-Encoding: chunked") + b"zz\r\n",
        post(b"", "Transfer-Encoding: chunked") + b"f" * 40 + b"\r\n",
    ],
)
async def test_what_is_not_http_is_refused(request_: bytes) -> None:
    async with served() as server, dialling(server.port) as wire:
        await wire.send(request_)
        assert status(await wire.rest()) == b"400"


# -- bodies --------------------------------------------------------------------------------------------


@on_a_clock
async def test_a_body_that_stops_is_not_waited_for() -> None:
    body = chat([image(1)])
    async with served() as server, dialling(server.port) as wire:
        await wire.send(post(body[:-1], length=len(body)))
        reply = await later(wire.rest(), MOST_S)
        assert status(reply) == b"408"
        assert b"less than 64 KiB of the body came within client_timeout_s=30" in reply


@on_a_clock
async def test_a_body_that_drips_is_not_waited_for() -> None:
    async with served() as server, dialling(server.port) as wire:
        await wire.send(post(b"{", length=2**20))
        assert status(await later(going_on(wire, b" "), MOST_S)) in (b"408", b"")


@on_a_clock
async def test_slow_bodies_keep_no_slot_and_no_memory_from_others() -> None:
    crowded = served(max_concurrent_requests=4, max_pending_bytes=2**19)
    async with crowded as server, contextlib.AsyncExitStack() as stack:
        slow = [await stack.enter_async_context(dialling(server.port)) for _ in range(4)]
        for wire in slow:
            await wire.send(post(b" " * 2**16, length=2**19))
        for wire in slow:
            assert status(await later(wire.rest(), MOST_S)) == b"408"
        await server.settled()
        await server.answers()


@on_a_clock
async def test_a_slow_body_ends_the_upstreams_request_too() -> None:
    ended = asyncio.Event()

    async def handle(wire: Wire) -> None:
        if b"/v1/other" in await wire.until(b"\r\n\r\n"):
            await wire.rest()
            ended.set()
        else:
            await wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    async with upstream(handle) as url, served(ProxyApp(url)) as server:
        async with dialling(server.port) as wire:
            await wire.send(post(b"{", path="/v1/other", length=100))
            assert status(await later(wire.rest(), MOST_S)) == b"408"
        await ended.wait()


@on_a_clock
async def test_a_large_body_may_take_long_if_it_keeps_coming() -> None:
    body = chat("text" * 2**16)
    async with served() as server, dialling(server.port) as wire:
        await wire.send(post(b"", "Connection: close", length=len(body)))
        for start in range(0, len(body), 2**16):
            forward(PATIENCE_S / 2)
            await wire.send(body[start : start + 2**16])
            for _ in range(50):  # for the server to have seen them
                await asyncio.sleep(0)
        assert status(await wire.rest()) == b"200"


@pytest.mark.parametrize(
    "request_",
    [
        post(b"", length=2**20 + 1),
        post(b"", length=10**18),
        post(b"", "Transfer-Encoding: chunked") + b"100001\r\n" + b" " * 0x100001 + b"\r\n0\r\n\r\n",
        post(b"", "Transfer-Encoding: chunked") + b"10000\r\n" + b" " * 0x10000,
    ],
    ids=["announced", "announced, absurd", "in one chunk", "announced by a chunk"],
)
@on_a_clock
async def test_a_body_beyond_the_limit_is_refused_whatever_it_announces(request_: bytes) -> None:
    async with served(max_body_bytes=2**16 - 1) as server, dialling(server.port) as wire:
        await wire.send(request_)
        assert status(await later(wire.rest(), MOST_S)) == b"413"


@on_a_clock
async def test_an_endless_body_is_left_at_the_bound_and_its_connection_soon() -> None:
    async with served() as server, dialling(server.port) as wire:
        await wire.send(post(b"", "Transfer-Encoding: chunked"))
        reply = await later(going_on(wire, b"10000\r\n" + b" " * 2**16 + b"\r\n"), MOST_S)
        assert status(reply) in (b"413", b"")


async def test_bytes_beyond_the_announced_length_are_another_request() -> None:
    async with served() as server, dialling(server.port) as wire:
        await wire.send(post(chat("text") + b'{"more": 1}', length=len(chat("text"))))
        reply = await wire.rest()
        assert status(reply) in (b"200", b"400")
        assert reply.count(b"HTTP/1.1 200") <= 1


# -- answers -------------------------------------------------------------------------------------------


class Torrent(Mirror):
    """Answers with more than any socket holds, unless it is asked in front of the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.left = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != "/v1/torrent":
            await super().__call__(scope, receive, send)
            return
        gone = asyncio.ensure_future(self._gone(receive))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not gone.done():
            await send({"type": "http.response.body", "body": bytes(2**18), "more_body": True})
            await asyncio.sleep(0)
        self.left.set()

    async def _gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass


@on_a_clock
async def test_who_does_not_take_an_answer_is_left() -> None:
    torrent = Torrent()
    async with served(torrent) as server, dialling(server.port) as wire:
        await wire.send(post(b"", path="/v1/torrent"))
        await wire.until(b"\r\n\r\n")
        wire.writer.transport.pause_reading()  # type: ignore[attr-defined]  # a transport that reads
        await later(torrent.left.wait(), MOST_S)


# -- connections ---------------------------------------------------------------------------------------


async def test_silent_connections_keep_nobody_from_being_served() -> None:
    async with served() as server, contextlib.AsyncExitStack() as stack:
        for _ in range(200):
            wire = await stack.enter_async_context(dialling(server.port))
            await wire.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n")
        await server.answers()


class Parked(Mirror):
    """Parks what asks for it, and counts what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.let = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked += 1
        if scope["path"] == "/v1/park":
            await self.let.wait()
        await super().__call__(scope, receive, send)


async def test_requests_behind_one_that_is_answered_wait_outside() -> None:
    parked, request = Parked(), post(b"", path="/v1/other")
    async with served(parked) as server:
        async with dialling(server.port) as wire:
            await wire.send(post(b"", path="/v1/park"))
            sending = asyncio.ensure_future(wire.send(request * (2**25 // len(request))))
            await asyncio.wait({sending}, timeout=1)
            assert not sending.done(), "the server read 32 MiB of requests that it does not answer"
            assert parked.asked == 1
            sending.cancel()
            wire.writer.transport.abort()
        parked.let.set()


async def test_an_upgrade_is_not_taken() -> None:
    async with served() as server, dialling(server.port) as wire:
        await wire.send(
            b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        assert status(await wire.rest()) == b"200"
