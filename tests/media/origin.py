"""A loopback origin that misbehaves in every way that we know of, and a canary that nobody may connect to."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from socket import SO_LINGER, SOL_SOCKET

import PIL.Image

LIMIT_S = 10  # for what is at hand at once unless something is broken

Handler = Callable[["Exchange"], Awaitable[None]]


def picture(format_: str = "PNG", colour: str = "red", size: tuple[int, int] = (8, 6)) -> bytes:
    """The bytes of a small picture."""
    file = io.BytesIO()
    PIL.Image.new("RGB", size, colour).save(file, format_)
    return file.getvalue()


class Exchange:
    """One request on one connection, as a handler sees it; it answers by hand."""

    def __init__(self, origin: Origin, path: str, headers: dict[str, str], writer: asyncio.StreamWriter):
        self.origin = origin
        self.path = path
        self.headers = headers
        self._writer = writer

    async def send(self, data: bytes) -> None:
        """Send and count ``data``; ConnectionError once the client has left."""
        self._writer.write(data)
        await self._writer.drain()
        self.origin.sent += len(data)

    async def answer(self, body: bytes = b"", status: str = "200 OK", *headers: str) -> None:
        """A whole answer with the headers it should have, and ``headers``."""
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
        await self.send("\r\n".join(lines).encode() + body)

    async def for_ever(self) -> None:
        """Nothing, until the client leaves."""
        await self.origin.left.wait()

    def reset(self) -> None:
        """End the connection by an RST."""
        self._writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()


class Origin:
    """Serves ``routes``; counts connections, requests by path, and bytes sent."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.routes: dict[str, Handler] = {}
        self.connects = 0
        self.open = 0
        self.requests: Counter[str] = Counter()
        self.sent = 0
        self.last_headers: dict[str, str] = {}
        self.left = asyncio.Event()  # when the origin ends
        self.port = 0
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    def url(self, path: str = "/ok", host: str | None = None, scheme: str = "http") -> str:
        return f"{scheme}://{host or self.host}:{self.port}{path}"

    async def until(self, predicate: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        """Wait until ``predicate`` of our counters is true."""

        async def wait() -> None:
            async with self._changed:
                await self._changed.wait_for(predicate)

        await asyncio.wait_for(wait(), limit_s)

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connects += 1
        self.open += 1
        try:
            await self._serve(reader, writer)
        except asyncio.CancelledError:
            pass  # the origin ends; Python 3.11's streams would log it
        finally:
            writer.close()
            self.open -= 1
            self._tasks.discard(task)
            await self._change()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._change()
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            early = await reader.readexactly(1)
            if early == b"\x16":  # a TLS handshake, which this is no server for
                writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                return
            while True:
                early = await self._exchange(early, reader, writer)

    async def _exchange(
        self, early: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bytes:
        """Answer one request; return what of the next one was read while looking out for the client's end."""
        head = (early + await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        path = head[0].split(" ")[1]
        fields = (line.partition(":") for line in head[1:])
        headers = {name.lower(): value.strip() for name, _, value in fields}
        self.requests[path] += 1
        self.last_headers = headers
        await self._change()
        handler = self.routes.get(path, not_found)
        answering = asyncio.ensure_future(handler(Exchange(self, path, headers, writer)))
        leaving = asyncio.ensure_future(reader.read(1))  # b"": the client has left
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done() and not leaving.result():
                raise ConnectionError("the client has left")
            await answering
        finally:
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)
        return b"" if leaving.cancelled() or leaving.exception() else leaving.result()

    async def _change(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def end(self) -> None:
        self.left.set()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def serving(host: str = "127.0.0.1") -> AsyncIterator[Origin]:
    """A running origin with the usual routes."""
    origin = Origin(host)
    origin.routes |= ROUTES
    server = await asyncio.start_server(origin.connected, host, 0)
    origin.port = server.sockets[0].getsockname()[1]
    try:
        yield origin
    finally:
        server.close()
        await origin.end()
        await server.wait_closed()


# -- how an origin may behave --------------------------------------------------------------------------


async def ok(exchange: Exchange) -> None:
    await exchange.answer(picture(), "200 OK", "Content-Type: image/png")


async def not_found(exchange: Exchange) -> None:
    await exchange.answer(b"there is nothing here", "404 Not Found")


async def mislabelled(exchange: Exchange) -> None:
    await exchange.answer(picture(), "200 OK", "Content-Type: text/plain")


async def html(exchange: Exchange) -> None:
    await exchange.answer(b"<html><body>secret</body></html>", "200 OK", "Content-Type: image/png")


async def empty(exchange: Exchange) -> None:
    await exchange.answer(b"")


async def reset(exchange: Exchange) -> None:
    exchange.reset()


async def no_http(exchange: Exchange) -> None:
    await exchange.send(b"SSH-2.0-OpenSSH_9.6\r\n")
    raise ConnectionError


async def silent(exchange: Exchange) -> None:
    """Headers never come."""
    await exchange.for_ever()


async def drip(exchange: Exchange) -> None:
    """One byte, and then the next for ever."""
    await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n\x89")
    await exchange.for_ever()


async def endless(exchange: Exchange) -> None:
    """A chunked body at full speed, without an end."""
    await exchange.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        await exchange.send(b"10000\r\n" + bytes(0x10000) + b"\r\n")


async def too_long(exchange: Exchange) -> None:
    """A Content-Length above every limit, and never a byte of it."""
    await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n")
    await exchange.for_ever()


async def lying_short(exchange: Exchange) -> None:
    """Says 10, sends for ever."""
    await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n" + picture())
    while True:
        await exchange.send(bytes(0x10000))


async def lying_long(exchange: Exchange) -> None:
    """Says more than comes."""
    data = picture()
    await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (len(data) + 1) + data)
    raise ConnectionError


async def gzip_bomb(exchange: Exchange) -> None:
    """64 MiB in 64 KiB."""
    await exchange.answer(gzip.compress(bytes(2**26), 1), "200 OK", "Content-Encoding: gzip")


async def silly_encoding(exchange: Exchange) -> None:
    """A picture, as it is, behind a Content-Encoding that is none."""
    await exchange.answer(picture(), "200 OK", "Content-Encoding: utf-8")


def redirect(location: str, status: str = "302 Found") -> Handler:
    async def answer(exchange: Exchange) -> None:
        await exchange.answer(b"moved", status, f"Location: {location}", "Set-Cookie: a=b; Path=/")

    return answer


def with_status(status: str) -> Handler:
    async def answer(exchange: Exchange) -> None:
        await exchange.answer(b"secret", status)

    return answer


def sized(length: int, *, chunked: bool) -> Handler:
    """A picture that zeros make ``length`` bytes long."""

    async def answer(exchange: Exchange) -> None:
        data = picture().ljust(length, b"\0")
        if chunked:
            head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            await exchange.send(head + b"%x\r\n" % length + data + b"\r\n0\r\n\r\n")
        else:
            await exchange.answer(data)

    return answer


ROUTES: dict[str, Handler] = {
    "/ok": ok,
    "/mislabelled": mislabelled,
    "/html": html,
    "/empty": empty,
    "/reset": reset,
    "/no-http": no_http,
    "/silent": silent,
    "/drip": drip,
    "/endless": endless,
    "/too-long": too_long,
    "/lying-short": lying_short,
    "/lying-long": lying_long,
    "/gzip-bomb": gzip_bomb,
    "/silly-encoding": silly_encoding,
    "/403": with_status("403 Forbidden"),
    "/500": with_status("500 Internal Server Error"),
    "/206": with_status("206 Partial Content"),
    "/relative": redirect("ok"),
    "/three": redirect("/two", "301 Moved Permanently"),
    "/two": redirect("/one", "307 Temporary Redirect"),
    "/one": redirect("/ok", "308 Permanent Redirect"),
    "/loop": redirect("/loop"),
    "/to-file": redirect("file:///etc/passwd"),
    "/to-nothing": redirect("https:///x"),
    "/to-garbage": redirect("http://[::1"),
}
