"""What passes through the proxy unchanged, what does not pass, and how each way of breaking off is told."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import socket
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from starlette.types import Message, Receive, Scope, Send

from retinue.server.proxy import ProxyApp

from .proxying import Handle, Wire, dialling, proxied, serving, upstream

END = b"\r\n\r\n"
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
EVENTS = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)
GET = b"GET /v1/models HTTP/1.1\r\nHost: client\r\n\r\n"
LAST = b"GET /v1/models HTTP/1.1\r\nHost: client\r\nConnection: close\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def answering(answer: bytes, seen: list[bytes] | None = None) -> Handle:
    """An upstream that answers each bodiless request with ``answer`` until its peer closes."""

    async def handle(wire: Wire) -> None:
        try:
            while True:
                head = await wire.until(END)
                if seen is not None:
                    seen.append(head)
                await wire.send(answer)
        except asyncio.IncompleteReadError:
            pass

    return handle


async def exchange(port: int, request: bytes) -> bytes:
    async with dialling(port) as client:
        await client.send(request)
        return await client.rest()


async def forwarded(request: bytes, *, base: str = "") -> tuple[bytes, list[bytes]]:
    """The request line and the header lines that the upstream got for ``request``."""
    seen: list[bytes] = []
    async with proxied(answering(PLAIN, seen), base=base) as port:
        await exchange(port, request)
    line, *headers = seen[0].removesuffix(END).split(b"\r\n")
    return line, headers


async def answered(answer: bytes, *, method: bytes = b"GET") -> tuple[bytes, bytes]:
    """The head and the rest of what the client got when the upstream sent ``answer``."""
    async with proxied(answering(answer)) as port:
        received = await exchange(port, LAST.replace(b"GET", method))
    head, _, body = received.partition(END)
    return head, body


# --- the request on its way up ---


@pytest.mark.parametrize("method", [b"GET", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS", b"HEAD"])
async def test_the_method_the_path_and_the_query_go_up_as_they_came(method: bytes) -> None:
    target = b"/v1/a%2Fb/%41/../c//d;e=f?x=%7e&y=a+b%20c&&z?=/"
    line, _ = await forwarded(b"%b %b HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n" % (method, target))
    assert line == b"%b %b HTTP/1.1" % (method, target)


@pytest.mark.parametrize("base", ["/base/path", "/base/path/"])
async def test_a_base_path_goes_before_the_path(base: str) -> None:
    line, _ = await forwarded(LAST, base=base)
    assert line == b"GET /base/path/v1/models HTTP/1.1"


async def test_end_to_end_headers_go_up_as_they_came_and_none_are_invented() -> None:
    seen: list[bytes] = []
    async with upstream(answering(PLAIN, seen)) as url, serving(ProxyApp(url)) as port:
        await exchange(
            port,
            b"GET / HTTP/1.1\r\nHost: client.example\r\nX-Twice: 1\r\nX-Twice: 2\r\n"
            b"Authorization: Bearer mine\r\nX-Text: \xc3\xa9\r\nCookie: a=1; b=2\r\n"
            b"Connection: close, X-Private\r\nX-Private: 1\r\nTE: trailers\r\nKeep-Alive: 1\r\n"
            b"Proxy-Authorization: Basic x\r\nProxy-Connection: close\r\nExpect: 100-continue\r\n\r\n",
        )
    assert sorted(line.lower() for line in seen[0].removesuffix(END).split(b"\r\n")[1:]) == [
        b"authorization: bearer mine",
        b"cookie: a=1; b=2",
        b"host: " + url.removeprefix("http://").encode(),
        b"x-text: \xc3\xa9",
        b"x-twice: 1",
        b"x-twice: 2",
    ]


async def test_an_api_key_takes_the_place_of_the_clients() -> None:
    seen: list[bytes] = []
    async with upstream(answering(PLAIN, seen)) as url, serving(ProxyApp(url, api_key="ours")) as port:
        await exchange(port, LAST.replace(b"Host", b"Authorization: Bearer mine\r\nHost"))
        await exchange(port, LAST)
    assert [head.lower().count(b"authorization: bearer ours") for head in seen] == [1, 1]
    assert b"mine" not in seen[0]


async def test_a_request_without_a_body_sends_none() -> None:
    _, headers = await forwarded(LAST)
    assert not [h for h in headers if h.lower().startswith((b"content-", b"transfer-"))]


async def test_an_upload_goes_up_as_it_arrives_under_its_content_length() -> None:
    arrived = asyncio.Event()
    heads: list[bytes] = []

    async def handle(wire: Wire) -> None:
        heads.append(await wire.until(END))
        assert await wire.until(b"first") == b"first"
        arrived.set()
        assert await wire.until(b"second") == b"second"  # and not in chunks
        await wire.send(PLAIN)

    async with proxied(handle) as port, dialling(port) as client:
        await client.send(
            b"POST / HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: 11\r\n\r\nfirst"
        )
        await arrived.wait()  # the client sends the rest only now
        await client.send(b"second")
        assert (await client.rest()).endswith(b"\r\n\r\nok")
    assert heads[0].lower().count(b"content-length: 11\r\n") == 1
    assert b"transfer-encoding" not in heads[0].lower()


async def test_an_upload_without_a_length_goes_up_in_chunks() -> None:
    uploads: list[bytes] = []

    async def handle(wire: Wire) -> None:
        uploads.append(await wire.until(b"0\r\n\r\n"))
        await wire.send(PLAIN)

    async with proxied(handle) as port, dialling(port) as client:
        await client.send(
            b"POST / HTTP/1.1\r\nHost: h\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
            + (chunk(b"all of it") + b"0\r\nX-Trailer: 1\r\n\r\n")
        )
        assert (await client.rest()).endswith(b"ok")
    head, _, body = uploads[0].partition(END)
    assert b"transfer-encoding: chunked" in head.lower()
    assert b"content-length" not in head.lower()
    assert body == chunk(b"all of it") + b"0\r\n\r\n"


async def test_a_large_upload_arrives_whole() -> None:
    body = bytes(range(256)) * 8192  # 2 MiB, more than any buffer on the way
    received: list[bytes] = []

    async def handle(wire: Wire) -> None:
        await wire.until(END)
        received.append(await wire.reader.readexactly(len(body)))
        await wire.send(PLAIN)

    request = b"POST / HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"
    async with proxied(handle) as port:
        assert (await exchange(port, request % (len(body), body))).endswith(b"ok")
    assert received == [body]


async def test_a_body_that_a_middleware_replaced_goes_up_in_the_first_ones_place() -> None:
    uploads: list[bytes] = []

    async def handle(wire: Wire) -> None:
        uploads.append(await wire.until(b"other body"))
        await wire.send(PLAIN)

    def replacing(app: ProxyApp) -> Callable[[Scope, Receive, Send], Any]:
        async def middleware(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                return await app(scope, receive, send)
            await receive()
            bodies = iter([{"type": "http.request", "body": b"the other body"}])

            async def replaced() -> Message:
                return next(bodies, None) or await receive()  # the body, and then what the client does

            headers = [(n, b"14" if n == b"content-length" else v) for n, v in scope["headers"]]
            return await app({**scope, "headers": headers}, replaced, send)

        return middleware

    async with upstream(handle) as url, serving(replacing(ProxyApp(url))) as port:
        await exchange(
            port, LAST.replace(b"GET", b"POST").removesuffix(END) + b"\r\nContent-Length: 3\r\n\r\none"
        )
    head, _, body = uploads[0].partition(END)
    assert b"content-length: 14" in head.lower()
    assert body == b"the other body"


async def test_an_answer_before_the_end_of_the_upload_reaches_the_client() -> None:
    async def handle(wire: Wire) -> None:
        await wire.until(END)
        await wire.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 5\r\n\r\nlarge")
        await wire.rest()

    async with proxied(handle) as port, dialling(port) as client:
        await client.send(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1000\r\n\r\nthe first of it")
        assert (await client.until(b"large")).startswith(b"HTTP/1.1 413 ")


async def test_a_path_that_would_become_a_part_of_the_host_is_refused() -> None:
    async with upstream(answering(PLAIN)) as url:
        app = ProxyApp(url)
        sent: list[Message] = []
        scope = {"type": "http", "method": "GET", "raw_path": b"@evil.example/", "path": "", "headers": []}
        await app(scope, _open_client(), _keep(sent))
        assert sent[0]["status"] == 400
        await app.aclose()


# --- the answer on its way down ---


async def test_each_piece_of_a_stream_reaches_the_client_before_the_next_is_sent() -> None:
    received = asyncio.Event()

    async def handle(wire: Wire) -> None:
        await wire.until(END)
        await wire.send(EVENTS + chunk(b"data: 1\n\n"))
        await received.wait()
        await wire.send(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async with proxied(handle) as port, dialling(port) as client:
        await client.send(LAST)
        head = await client.until(END)
        assert await client.until(b"data: 1\n\n")
        received.set()
        assert await client.rest() == b"\r\n" + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    assert b"content-type: text/event-stream; charset=utf-8" in head


async def test_end_to_end_headers_come_down_as_they_were_and_cookies_are_not_kept() -> None:
    seen: list[bytes] = []
    answer = (
        b"HTTP/1.1 418 I'm a teapot\r\nContent-Length: 2\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2; Path=/\r\n"
        b"Connection: keep-alive, X-Private\r\nX-Private: 1\r\nKeep-Alive: timeout=5\r\nTrailer: X-T\r\n"
        b"Proxy-Authenticate: Basic\r\nUpgrade: h2c\r\nX-Kept: \xe9\r\n\r\nok"
    )
    async with proxied(answering(answer, seen)) as port:
        head, _, body = (await exchange(port, LAST)).partition(END)
        await exchange(port, LAST)
    line, *headers = head.split(b"\r\n")
    names = {header.partition(b":")[0] for header in headers}
    assert line.startswith(b"HTTP/1.1 418 ")
    assert [h for h in headers if h.startswith(b"set-cookie")] == [
        b"set-cookie: a=1",
        b"set-cookie: b=2; Path=/",
    ]
    assert b"x-kept: \xe9" in headers
    assert not names & {b"x-private", b"keep-alive", b"trailer", b"proxy-authenticate", b"upgrade"}
    assert body == b"ok"
    assert b"cookie" not in seen[1].lower()


@pytest.mark.parametrize(
    ("method", "status"), [(b"HEAD", b"200 OK"), (b"GET", b"204 No Content"), (b"GET", b"304 Not Modified")]
)
async def test_an_answer_that_has_no_body_leaves_the_connection_usable(method: bytes, status: bytes) -> None:
    length = b"" if status.startswith(b"204") else b"Content-Length: 7\r\n"
    answer = b"HTTP/1.1 %b\r\n%bETag: x\r\n\r\n" % (status, length)
    async with proxied(answering(answer)) as port, dialling(port) as client:
        for _ in range(2):
            await client.send(GET.replace(b"GET", method))
            head = await client.until(END)
            assert head.startswith(b"HTTP/1.1 " + status[:3])
            assert b"etag: x" in head
            assert b"transfer-encoding" not in head
        await client.send(LAST.replace(b"GET", method))
        assert (await client.rest()).endswith(END)
    if method == b"HEAD":
        assert b"content-length: 7" in head


async def test_a_compressed_answer_stays_compressed() -> None:
    packed = gzip.compress(b"text " * 100)
    head, body = await answered(
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%b" % (len(packed), packed)
    )
    assert b"content-encoding: gzip" in head
    assert body == packed


async def test_a_redirect_is_the_clients_to_follow() -> None:
    head, _ = await answered(b"HTTP/1.1 307 Go\r\nLocation: /elsewhere?a=%2F\r\nContent-Length: 0\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 307 ")
    assert b"location: /elsewhere?a=%2F" in head


async def test_an_upstreams_error_is_passed_on_as_it_is() -> None:
    head, body = await answered(b"HTTP/1.1 503 No\r\nRetry-After: 3\r\nContent-Length: 4\r\n\r\nbusy")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 3" in head
    assert body == b"busy"


async def test_the_trailers_of_an_answer_in_chunks_end_at_the_proxy() -> None:
    _, body = await answered(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"body") + b"0\r\nX-Sum: 1\r\n\r\n"
    )
    assert body == chunk(b"body") + b"0\r\n\r\n"


async def test_another_asgi_server_behind_is_answered_through() -> None:
    async def echo(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        message = await receive()
        body = message["body"] + scope["path"].encode()
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async with (
        serving(echo) as behind,
        serving(ProxyApp(f"http://127.0.0.1:{behind}")) as port,
        aiohttp.ClientSession() as session,
    ):
        for n in range(3):
            async with session.post(f"http://127.0.0.1:{port}/{n}", data=b"sent to ") as response:
                assert (response.status, await response.text()) == (201, f"sent to /{n}")


async def test_no_number_of_open_streams_keeps_another_request_waiting() -> None:
    n = 120  # more than a pool holds that has a usual limit
    open_streams, all_open = 0, asyncio.Event()

    async def handle(wire: Wire) -> None:
        nonlocal open_streams
        await wire.until(END)
        open_streams += 1
        if open_streams == n:
            all_open.set()
        await all_open.wait()
        await wire.send(PLAIN)

    async with proxied(handle) as port:
        answers = await asyncio.gather(*(exchange(port, LAST) for _ in range(n)))
    assert all(answer.endswith(b"ok") for answer in answers)


# --- the client leaves ---


@pytest.mark.parametrize("http", ["httptools", "h11"])
@pytest.mark.parametrize(
    "begun", [b"", EVENTS + chunk(b"data: 1\n\n"), PLAIN[:-1]], ids=["silent", "events", "plain"]
)
@pytest.mark.parametrize("body", [b"", b"the body"], ids=["get", "post"])
async def test_a_client_that_leaves_ends_the_request_to_the_upstream(
    http: str, begun: bytes, body: bytes
) -> None:
    asked, left = asyncio.Event(), asyncio.Event()

    async def handle(wire: Wire) -> None:
        await wire.until(body or END)
        await wire.send(begun)
        asked.set()
        await wire.rest()
        left.set()

    async with proxied(handle, http=http) as port:
        async with dialling(port) as client:
            method = b"POST" if body else b"GET"
            await client.send(
                b"%b / HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%b" % (method, len(body), body)
            )
            await asked.wait()
            if begun:
                await client.until(END)
        await left.wait()


@pytest.mark.parametrize(
    ("framing", "sent"),
    [(b"Content-Length: 1000", b"first"), (b"Transfer-Encoding: chunked", chunk(b"first"))],
    ids=["length", "chunks"],
)
async def test_a_client_that_leaves_while_it_sends_never_seems_to_have_sent_all(
    framing: bytes, sent: bytes, caplog: Any
) -> None:
    asked, ends = asyncio.Event(), []

    async def handle(wire: Wire) -> None:
        await wire.until(sent)
        asked.set()
        ends.append(await wire.rest())

    async with proxied(handle) as port, dialling(port) as client:
        await client.send(b"POST / HTTP/1.1\r\nHost: h\r\n%b\r\n\r\n%b" % (framing, sent))
        await asked.wait()
    assert ends == [b""]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


# --- the upstream breaks off ---


def breaking_off(sent: bytes) -> Handle:
    async def handle(wire: Wire) -> None:
        await wire.until(END)
        await wire.send(sent)

    return handle


@pytest.mark.parametrize("http", ["httptools", "h11"])
@pytest.mark.parametrize(
    "begun",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf of",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"half of"),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"half of") + b"ff\r\n",
        EVENTS.replace(b"Transfer-Encoding: chunked", b"Content-Length: 100") + b"half of",
        EVENTS.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n") + chunk(b"half of"),
    ],
    ids=["length", "chunks", "in-a-chunk", "events-length", "events-gzip"],
)
async def test_an_answer_that_breaks_off_breaks_off_for_the_client_too(
    http: str, begun: bytes, caplog: Any
) -> None:
    async with proxied(breaking_off(begun), http=http) as port:
        async with dialling(port) as client:
            await client.send(GET)
            head, _, body = (await client.rest()).partition(END)
        async with (
            aiohttp.ClientSession(auto_decompress=False) as session,
            session.get(f"http://127.0.0.1:{port}/") as response,
        ):
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
    assert head.startswith(b"HTTP/1.1 200 ")
    assert body in (b"half of", chunk(b"half of"))
    ours = [record for record in caplog.records if record.name == "retinue"]
    assert [record.levelname for record in ours] == ["WARNING", "WARNING"]
    assert not [record for record in caplog.records if record.exc_info]


async def test_an_answer_that_turns_into_nonsense_breaks_off_for_the_client() -> None:
    received = asyncio.Event()

    async def handle(wire: Wire) -> None:
        await wire.until(END)
        await wire.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"half of"))
        await received.wait()
        await wire.send(b"no chunk\r\n")
        await wire.rest()

    async with proxied(handle) as port, dialling(port) as client:
        await client.send(GET)
        await client.until(chunk(b"half of"))
        received.set()
        assert await client.rest() == b""


@pytest.mark.parametrize("inside", [b"", b'data: {"cho', b"data: 2\n", b"data: 2\r"])
@pytest.mark.parametrize("begun", [b"", b"data: 1\n\n", b"data: 1\r\n\r\n", b"data: 1\r\r"])
async def test_events_that_break_off_end_in_an_error_event_and_are_not_done(
    begun: bytes, inside: bytes, caplog: Any
) -> None:
    sent = b"".join(chunk(part) for part in (begun, inside) if part)
    async with (
        proxied(breaking_off(EVENTS + sent)) as port,
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}/") as response,
    ):
        events = await response.read()
    assert events.startswith(begun + b"data: {")
    error = json.loads(events.removeprefix(begun + b"data: "))["error"]
    assert (error["type"], error["code"]) == ("server_error", "upstream_disconnected")
    assert events.endswith(b"}\n\n")
    assert b"[DONE]" not in events
    assert [record.levelname for record in caplog.records if record.name == "retinue"] == ["WARNING"]


async def test_an_event_passes_as_soon_as_all_of_it_is_there_and_what_is_none_at_the_end() -> None:
    came = asyncio.Queue[bytes]()

    async def handle(wire: Wire) -> None:
        await wire.until(END)
        await wire.send(EVENTS)
        for part in (b"data: 1\n", b"\ndata: 2\r\n\r", b"\n: beating\n\ndata", b": 3"):
            await wire.send(chunk(part))
            if part.endswith(b"data"):
                assert await came.get() == b"the first two"
        await wire.send(b"0\r\n\r\n")

    async with (
        proxied(handle) as port,
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}/") as response,
    ):
        whole = b"data: 1\n\ndata: 2\r\n\r\n: beating\n\n"
        assert await response.content.readexactly(len(whole)) == whole
        came.put_nowait(b"the first two")
        assert await response.read() == b"data: 3"


# --- the upstream does not answer ---


async def test_an_upstream_that_refuses_connections_is_a_502_without_internals() -> None:
    async with upstream(answering(PLAIN)) as url:
        pass
    async with serving(ProxyApp(url)) as port:
        await expect_502(port)


@pytest.mark.parametrize(
    "sent", [b"", b"HTTP/1.1 200 OK\r\nContent-", b"no HTTP\r\n\r\n"], ids=["none", "part", "other"]
)
@pytest.mark.parametrize("method", ["GET", "POST", "PUT"])
async def test_a_request_that_is_not_answered_is_a_502_and_never_sent_again(sent: bytes, method: str) -> None:
    requests = 0

    async def handle(wire: Wire) -> None:
        nonlocal requests
        await wire.until(END)
        requests += 1
        await wire.send(sent)

    async with proxied(handle) as port:
        await expect_502(port, method)
    assert requests == 1


async def test_a_request_on_a_kept_connection_that_then_closes_is_never_sent_again() -> None:
    requests = 0

    async def handle(wire: Wire) -> None:
        nonlocal requests
        await wire.until(END)
        requests += 1
        await wire.send(PLAIN)
        await wire.until(END)
        requests += 1

    async with proxied(handle) as port:
        assert (await exchange(port, LAST)).endswith(b"ok")
        await expect_502(port)
    assert requests == 2


async def test_an_upstream_that_closes_during_the_upload_is_a_502() -> None:
    async def handle(wire: Wire) -> None:
        await wire.until(b"first")

    async with proxied(handle) as port, dialling(port) as client:
        await client.send(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1000\r\n\r\nfirst")
        assert (await client.until(b"}}")).startswith(b"HTTP/1.1 502 ")


async def test_an_upstream_that_speaks_no_tls_is_a_502() -> None:
    async def handle(wire: Wire) -> None:
        await wire.reader.read(1)

    async with upstream(handle) as url, serving(ProxyApp(url.replace("http:", "https:"))) as port:
        await expect_502(port)


async def test_an_upstream_whose_name_is_not_known_is_a_502() -> None:
    async with serving(ProxyApp("http://upstream.invalid:80")) as port:
        await expect_502(port)


async def test_a_connection_that_is_not_made_in_time_is_a_502() -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        async with dialling(deaf.getsockname()[1]):  # fills its queue: nobody accepts, nobody else gets in
            url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
            async with serving(ProxyApp(url, connect_timeout_s=0.2)) as port:
                await expect_502(port)


async def expect_502(port: int, method: str = "GET") -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, f"http://127.0.0.1:{port}/v1/models") as response,
    ):
        assert response.status == 502
        assert await response.json() == {
            "error": {
                "message": "the upstream cannot be reached",
                "type": "server_error",
                "param": None,
                "code": "upstream_unreachable",
            }
        }


# --- what is no request ---


async def test_a_websocket_is_refused() -> None:
    sent: list[Message] = []
    await ProxyApp("http://127.0.0.1:1")({"type": "websocket", "headers": []}, _open_client(), _keep(sent))
    assert sent == [{"type": "websocket.close"}]


async def test_the_lifespan_ends_with_the_connections_to_the_upstream_closed() -> None:
    closed = asyncio.Event()

    async def handle(wire: Wire) -> None:
        await wire.until(END)
        await wire.send(PLAIN)
        await wire.rest()
        closed.set()

    messages: asyncio.Queue[Message] = asyncio.Queue()
    sent: list[Message] = []
    async with upstream(handle) as url:
        app = ProxyApp(url)
        living = asyncio.ensure_future(app({"type": "lifespan"}, messages.get, _keep(sent)))
        messages.put_nowait({"type": "lifespan.startup"})
        assert await app.reachable()
        messages.put_nowait({"type": "lifespan.shutdown"})
        await living
        await closed.wait()
    assert [message["type"] for message in sent] == [
        "lifespan.startup.complete",
        "lifespan.shutdown.complete",
    ]


@pytest.mark.parametrize(
    ("status", "reachable"), [(200, True), (404, True), (302, True), (500, False), (503, False)]
)
async def test_an_upstream_is_reachable_when_its_health_is_no_servers_error(
    status: int, reachable: bool
) -> None:
    seen: list[bytes] = []
    async with upstream(answering(b"HTTP/1.1 %d X\r\nContent-Length: 0\r\n\r\n" % status, seen)) as url:
        app = ProxyApp(f"{url}/base/")
        assert await app.reachable() is reachable
        await app.aclose()
    assert seen[0].startswith(b"GET /base/health HTTP/1.1\r\n")


async def test_an_upstream_that_is_gone_or_silent_is_not_reachable() -> None:
    async def silent(wire: Wire) -> None:
        await wire.rest()

    async with upstream(silent) as url:
        app = ProxyApp(url)
        assert not await app.reachable()
    assert not await app.reachable()
    await app.aclose()


async def test_closing_twice_or_unused_is_no_error() -> None:
    app = ProxyApp("http://127.0.0.1:1")
    await app.aclose()
    assert not await app.reachable()
    await app.aclose()
    await app.aclose()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "host:8000",
        "ftp://host",
        "http://",
        "http:///path",
        "http://h:port",
        "http://h?a=b",
        "http://h/#f",
    ],
)
def test_an_upstream_that_no_request_can_be_sent_to_is_refused_at_birth(url: str) -> None:
    with pytest.raises(ValueError, match="upstream="):
        ProxyApp(url)


def test_a_password_in_the_url_is_refused_and_not_shown() -> None:
    with pytest.raises(ValueError, match="api_key") as caught:
        ProxyApp("http://user:secret@host")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_timeout_that_is_no_time_is_refused_at_birth(seconds: float) -> None:
    with pytest.raises(ValueError, match="connect_timeout_s"):
        ProxyApp("http://host", connect_timeout_s=seconds)


def _open_client() -> Receive:
    """A client that has sent all of its request and stays."""

    async def receive() -> Message:
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    return receive


def _keep(sent: list[Message]) -> Send:
    async def send(message: Message) -> None:
        sent.append(message)

    return send
