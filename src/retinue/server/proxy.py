"""A streaming reverse proxy: what stands behind the middleware when another server runs the model.

Bytes pass as they come, both ways; those of an event once all of it is there, so that a stream that breaks
off can end in an event of ours. Nothing else is held back, and nothing is decompressed, followed, retried or
remembered.

Who receives
    The upload calls ``receive`` until the body has ended; from then on ``Connection`` does, and when the
    client leaves, it cancels the exchange. That closes the connection to the upstream, which is how a server
    such as vLLM learns that it may stop generating.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable, Iterator
from urllib.parse import quote

import aiohttp
from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout
from multidict import CIMultiDict
from starlette.types import Message, Receive, Scope, Send
from yarl import URL

from retinue.server.connection import ClientLeft, Connection
from retinue.server.errors import refusal

__all__ = ["ProxyApp"]

logger = logging.getLogger("retinue")

Headers = list[tuple[bytes, bytes]]

_HOP_BY_HOP = {b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
_EVENT_ENDS = (b"\n\n", b"\r\r", b"\n\r\n")
_IDLE_S = 1.0  # below the keep-alive of any server: it is we who close, so no request meets a closing one
_HEALTH_S = 2.0
_LOOK_S = 1.0


class ProxyApp:
    """An ASGI app that sends every HTTP request on to ``upstream``; WebSockets are refused.

    ``upstream``: an http or https URL, with a base path if need be, as in ``http://127.0.0.1:8000``.
    ``api_key``: sent as the bearer token, in place of what the client sent; None passes the client's on.
    An answer may take as long as it takes; ``connect_timeout_s`` bounds only the making of a connection.

    A request that the upstream does not answer gets 502. An answer that breaks off is never completed: a
    stream of events ends in an error event, any other in a closed connection.
    """

    def __init__(self, upstream: str, *, connect_timeout_s: float = 5.0, api_key: str | None = None) -> None:
        if not connect_timeout_s > 0:
            raise ValueError(f"connect_timeout_s={connect_timeout_s} is not above 0")
        self._base = _base(upstream)
        self._connect_timeout_s = connect_timeout_s
        self._api_key = api_key
        self._session: ClientSession | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one connection of the server's, as ASGI has it."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})
        else:
            upload = _Upload(scope, receive)
            client = Connection(scope, upload.then)
            try:
                with contextlib.suppress(ClientLeft):
                    await client.unless_left(self._forward(scope, upload, send))
            finally:
                client.close()

    async def reachable(self) -> bool:
        """Whether the upstream's ``/health`` answers within 2 s, and with less than a server's error."""
        url, timeout = f"{self._base}/health", ClientTimeout(total=_HEALTH_S)
        try:
            async with self._connections().get(url, timeout=timeout, allow_redirects=False) as answer:
                return answer.status < 500
        except (ClientError, asyncio.TimeoutError):
            return False

    async def aclose(self) -> None:
        """Close all connections to the upstream; those in use break off."""
        if self._session is not None:
            await self._session.close()

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.aclose()
        await send({"type": "lifespan.shutdown.complete"})

    async def _forward(self, scope: Scope, upload: _Upload, send: Send) -> None:
        try:
            url = self._url(scope)
        except ValueError:
            response = refusal(400, "the request has no valid path", code="invalid_path")
            return await response(scope, upload.then, send)
        try:
            answer = await self._connections().request(
                scope["method"],
                url,
                headers=self._upward(upload.headers),
                data=upload.chunks() if upload.expected else None,
                allow_redirects=False,
            )
        except ClientError as error:
            logger.warning("no answer from the upstream to %s %s: %s", scope["method"], url.raw_path, error)
            response = refusal(502, "the upstream cannot be reached", code="upstream_unreachable")
            return await response(scope, upload.then, send)
        async with answer:
            return await _pass_on(answer, send)

    def _url(self, scope: Scope) -> URL:
        # The raw bytes: to decode and encode them again would turn a%2Fb into a/b.
        raw_path: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
        if not raw_path.startswith(b"/"):  # it would become a part of the host
            raise ValueError(raw_path)
        query: bytes = scope.get("query_string", b"")
        return URL(self._base + (raw_path + b"?" + query if query else raw_path).decode(), encoded=True)

    def _upward(self, headers: Headers) -> CIMultiDict[str]:
        # aiohttp writes UTF-8: what is valid comes out as it came in.
        sent = CIMultiDict((name.decode(), value.decode(errors="replace")) for name, value in headers)
        if self._api_key is not None:
            sent["authorization"] = f"Bearer {self._api_key}"
        return sent

    def _connections(self) -> ClientSession:
        if self._session is None or self._session.closed:
            self._session = ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
                timeout=ClientTimeout(total=None, connect=self._connect_timeout_s, sock_connect=None),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
                middlewares=(_once,),
            )
        return self._session


class _Upload:
    """What a request sends: its headers for the upstream, its body, and ``then`` the client's leaving."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        given = dict(scope["headers"])
        chunked = b"transfer-encoding" in given
        self.expected = chunked or given.get(b"content-length", b"0") != b"0"
        # Expect: it is our own server that tells the client to continue.
        # Content-Length next to Transfer-Encoding counts for nothing, and is how requests are smuggled.
        ours = {b"host", b"expect", b"content-length"} if chunked else {b"host", b"expect"}
        self.headers = [header for header in _end_to_end(scope["headers"]) if header[0] not in ours]
        self._receive = receive
        self._ended = asyncio.Event()
        if not self.expected:
            self._ended.set()

    async def chunks(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._ended.set()
                await asyncio.Event().wait()  # until ``then``, which sees the same, has us cancelled
            more = message.get("more_body", False)
            if not more:
                self._ended.set()
            yield message.get("body", b"")

    async def then(self) -> Message:
        """A ``receive`` for after the body."""
        await self._ended.wait()
        return await self._receive()


async def _once(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> ClientResponse:
    """Keep aiohttp from sending a request twice.

    Up to 3.14 at least, it sends GET, PUT, DELETE and the like again when one of these two errors ends the
    first attempt, on a fresh connection too, and whatever the upstream has done by then.
    """
    try:
        return await handler(request)
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        raise aiohttp.ClientConnectionError(str(error)) from error


async def _pass_on(answer: ClientResponse, send: Send) -> None:
    headers = _end_to_end(answer.raw_headers)
    if answer.status in (204, 304):  # uvicorn takes their length for a promise, and no body comes
        headers = [header for header in headers if header[0] != b"content-length"]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    takes_event, held = _takes_event(headers), b""
    try:
        with _ending_with_its_connection(answer):
            async for chunk in answer.content.iter_any():
                if takes_event:
                    held += chunk
                    whole = _whole_events(held)
                    chunk, held = held[:whole], held[whole:]
                if chunk:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
    except ClientError as error:
        logger.warning("the upstream broke off its answer to %s: %s", answer.url.raw_path, error)
        if not takes_event:
            return  # without a last message the server closes the connection; to raise would add a traceback
        said = refusal(502, "the upstream broke off its answer", code="upstream_disconnected").body
        held = b"data: " + bytes(said) + b"\n\n"
    await send({"type": "http.response.body", "body": held, "more_body": False})


@contextlib.contextmanager
def _ending_with_its_connection(answer: ClientResponse) -> Iterator[None]:
    """Wake the reader of ``answer`` when its connection is gone and aiohttp does not.

    Up to 3.14 at least, aiohttp's parser forgets the reader when the body turns into what is no HTTP.
    """
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def look() -> None:
        nonlocal timer
        connection, content = answer.connection, answer.content  # no connection: all of the body is here
        if connection and connection.transport is None and not content.is_eof() and not content.exception():
            content.set_exception(aiohttp.ClientPayloadError("what came is not HTTP"))
        timer = loop.call_later(_LOOK_S, look)

    timer = loop.call_later(_LOOK_S, look)
    try:
        yield
    finally:
        timer.cancel()


def _takes_event(headers: Headers) -> bool:
    """Whether an event can be added to an answer with ``headers``."""
    given = dict(headers)
    plain = b"content-length" not in given and b"content-encoding" not in given
    return plain and given.get(b"content-type", b"").lower().startswith(b"text/event-stream")


def _whole_events(stream: bytes) -> int:
    """How many bytes of ``stream`` are whole events: up to the last empty line."""
    return max((stream.rfind(end) + len(end) for end in _EVENT_ENDS if end in stream), default=0)


def _end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """``headers``, names in lower case, without those that concern one connection (RFC 9110, 7.6.1)."""
    lower = [(name.lower(), value) for name, value in headers]
    options = b",".join(value for name, value in lower if name == b"connection").lower().split(b",")
    dropped = _HOP_BY_HOP.union(option.strip() for option in options)
    return [(n, value) for n, value in lower if n not in dropped and not n.startswith(b"proxy-")]


def _base(upstream: str) -> str:
    """``upstream`` without a slash at its end; ``ValueError`` if requests cannot be sent there."""
    try:
        url = URL(upstream)
    except ValueError as error:
        raise ValueError(f"upstream={upstream!r} is not a URL: {error}") from None
    if url.user is not None or url.password is not None:
        raise ValueError("upstream holds a user or a password; say api_key instead")  # not shown: a secret
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"upstream={upstream!r} is not an http or https URL with a host")
    if url.query_string or url.fragment:
        raise ValueError(f"upstream={upstream!r} holds more than a host, a port and a path")
    return str(url).rstrip("/")
