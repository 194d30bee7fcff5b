"""Faults that others' servers had in the field, over real sockets; the library's are a folder further up.

Each section names its case, and each test the right behavior.
"""

from __future__ import annotations

import asyncio
import base64
import collections
import contextlib
import gc
import io
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
import torch

from retinue.encoder import Preprocessed
from retinue.media import Image, MediaPolicy
from retinue.server.limits import ServerLimits
from retinue.server.serving import listening
from retinue.server.stack import Behind, Stack

from ..encoder.support import Gate, nothing
from ..media.origin import Exchange, not_found
from ..media.origin import serving as serving_origin
from .asgi import SOON_S, Mirror, Reply
from .backends import Tags, data_url, png, rows_of
from .processes import Process, program, started
from .proxying import dialling
from .test_end_to_end import request, until
from .test_middleware import CHAT, chat, contents_of, embeds, image
from .test_serving import accepts

#: The tag of the picture that a test is about, and of one that nobody minds.
ODD, PLAIN = 7, 200


@pytest.fixture(autouse=True)
def nothing_is_left(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Neither a thread nor a complaint of an event loop, of a callback or an error never retrieved."""
    before = set(threading.enumerate())
    with caplog.at_level(logging.WARNING, "asyncio"):
        yield
        gc.collect()
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert not {name for name in left if not name.startswith("asyncio_")}  # those are the test's own loop's
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


class Told(Tags):
    """``Tags`` that wait at ``gate`` in every forward, until it is opened.

    ``prepare`` and ``forward`` run within the methods of that name, with what these get, and may raise;
    ``cost`` is that of a tag.
    """

    def __init__(
        self,
        *,
        prepare: Callable[[Image, int], object] = nothing,
        forward: Callable[[Sequence[int]], object] = nothing,
        cost: Callable[[int], Any] = lambda tag: 1,
        max_batch_cost: int = 16,
        max_batch_items: int | None = None,
    ) -> None:
        super().__init__()
        self.gate = Gate()
        self.max_batch_cost = max_batch_cost
        self.max_batch_items = max_batch_items
        self._prepare, self._forward, self._cost = prepare, forward, cost

    def preprocess(self, raw: Image) -> Preprocessed[int]:
        tag = super().preprocess(raw).item
        self._prepare(raw, tag)
        return Preprocessed(tag, cost=self._cost(tag))

    def forward_batch(self, items: Sequence[int], target_bucket: int | None = None) -> list[torch.Tensor]:
        artifacts = super().forward_batch(items)
        self.gate()
        self._forward(items)
        return artifacts


class Site:
    """A running server, and a client of it."""

    def __init__(self, stack: Stack, url: str, session: aiohttp.ClientSession) -> None:
        self.stack = stack
        self.url = url
        self.port = int(url.rsplit(":", 1)[1])
        self._session = session

    async def ask(self, *urls: str, **options: Any) -> Reply:
        """The answer to a request with the pictures at ``urls``."""
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        body = io.BytesIO(chat(parts))  # large ones as bytes are worth a warning to aiohttp
        async with self._session.post(self.url + CHAT, data=body, **options) as answer:
            return Reply(answer.status, dict(answer.headers), await answer.read())

    def asking(self, *urls: str) -> asyncio.Task[Reply]:
        return asyncio.create_task(self.ask(*urls))

    async def get(self, path: str) -> Reply:
        async with self._session.get(self.url + path) as answer:
            return Reply(answer.status, dict(answer.headers), await answer.read())

    async def queued(self, items: int) -> None:
        """Wait until so many images wait for a batch."""
        await until(lambda: self.stack.encoder.pending().items == items)

    def gauge(self, name: str) -> float:
        lines = self.stack.metrics.text().decode().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"retinue_{name} "))

    async def is_well(self) -> None:
        """A normal request is answered, the server is ready, and nothing of any request is left in it."""
        assert_own(await self.ask(data_url(PLAIN, 16, 16)), PLAIN)
        assert (await self.get("/ready")).status == 200
        for name in ("requests_in_flight", "pending_bytes", "pending_items", "pending_cost", "running_cost"):
            await until(lambda name=name: self.gauge(name) == 0)


@contextlib.asynccontextmanager
async def site(backend: Told, **options: Any) -> AsyncIterator[Site]:
    """A server in front of a mirror, which in the end must be well."""
    stack = Stack(backend, "none", Behind(Mirror()), **options)
    connector = aiohttp.TCPConnector(limit=0)
    async with listening(stack) as url, aiohttp.ClientSession(connector=connector) as session:
        running = Site(stack, url, session)
        try:
            yield running
        finally:
            backend.gate.open()
        await running.is_well()


async def all_of(asking: Sequence[asyncio.Task[Reply]]) -> list[Reply]:
    return await asyncio.wait_for(asyncio.gather(*asking), SOON_S)


def assert_own(reply: Reply, *tags: int) -> None:
    """It was answered with the rows of these pictures, in this order."""
    [content] = contents_of(reply)
    assert len(content) == len(tags)
    for part, tag in zip(content, tags, strict=True):
        assert torch.equal(embeds(part), rows_of(tag))


def code_of(reply: Reply) -> tuple[int | None, str]:
    return reply.status, reply.json()["error"]["code"]


def fail(*_: object) -> None:
    raise RuntimeError("no such shape")


def on(tag: int, function: Callable[[], object]) -> Callable[[Sequence[int]], None]:
    """Calls ``function`` in every forward with this picture in it."""

    def forward(items: Sequence[int]) -> None:
        if tag in items:
            function()

    return forward


# -- a cost that is none (FC-01) -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cost", "answer", "words"),
    [
        (fail, (500, "encoder_failed"), "image 1 of 1: preprocess raised RuntimeError"),
        *(
            (value, (500, "encoder_failed"), "image 1 of 1: preprocess gave a cost that is no positive int")
            for value in (None, "3", 0, -1, 2.5, float("nan"), float("inf"), True)
        ),
        (10**30, (400, "invalid_input"), "image 1 of 1 costs"),
    ],
    ids=lambda value: getattr(value, "__name__", repr(value)) if not isinstance(value, tuple) else "",
)
async def test_a_cost_that_is_none_fails_its_request_and_leaves_the_server_ready(
    cost: Any, answer: tuple[int, str], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    def cost_of(tag: int) -> Any:
        return 1 if tag != ODD else cost(tag) if callable(cost) else cost

    backend = Told(cost=cost_of)
    async with site(backend) as server:
        one = server.asking(data_url(1))
        await backend.gate.reached()
        three = server.asking(data_url(3))
        reply = await asyncio.wait_for(server.ask(data_url(ODD)), SOON_S)  # while the gate is closed
        backend.gate.open()
        assert_own(await one, 1)
        assert_own(await three, 3)
    assert code_of(reply) == answer
    assert words in (caplog.text if answer[0] == 500 else reply.json()["error"]["message"])


# -- a picture of one pixel, and pictures that are none (FC-02) ----------------------------------------


@pytest.mark.parametrize(
    ("place", "answer"),
    [("accepted", 200), ("preprocess", 400), ("forward", 500)],
)
async def test_a_picture_of_one_pixel_wedges_nobody_wherever_it_fails(place: str, answer: int) -> None:
    def prepare(raw: Image, tag: int) -> None:
        if min(raw.size) < 14 and place == "preprocess":
            raise ValueError("too small")

    backend = Told(prepare=prepare, forward=on(ODD, fail) if place == "forward" else nothing)
    async with site(backend) as server:
        parked = server.asking(data_url(0, 16, 16))
        await backend.gate.reached()
        tiny = server.asking(data_url(ODD, 1, 1))
        if place == "preprocess":
            await asyncio.wait({tiny}, timeout=SOON_S)
        else:
            await server.queued(1)  # so that it is in the batch of the others
        others = [server.asking(data_url(tag, 16, 16)) for tag in range(10, 18)]
        await server.queued(8 + (place != "preprocess"))
        backend.gate.open()
        replies = await all_of([parked, tiny, *others])
        assert replies[1].status == answer
        for tag, reply in zip(range(10, 18), replies[2:], strict=True):
            assert_own(reply, tag)
    if place != "preprocess":
        assert set(backend.calls[1]) == {ODD, *range(10, 18)}


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def bent(data: bytes) -> bytes:
    """With other pixels than its checksums say."""
    at = data.index(b"IDAT") + 6
    return data[:at] + bytes(255 - byte for byte in data[at : at + 4]) + data[at + 4 :]


@pytest.mark.parametrize("corrupt", [cut, bent])
async def test_a_corrupt_png_that_says_jpeg_is_a_400_and_its_neighbors_are_answered(
    corrupt: Callable[[bytes], bytes],
) -> None:
    url = "data:image/jpeg;base64," + base64.b64encode(corrupt(png(ODD, 64, 64))).decode()
    backend = Told()
    backend.gate.open()
    async with site(backend) as server:
        others = [server.asking(data_url(tag)) for tag in range(8)]
        reply = await server.ask(url)
        assert code_of(reply) == (400, "invalid_input")
        assert "image 1 of 1" in reply.json()["error"]["message"]
        for tag, other in enumerate(await all_of(others)):
            assert_own(other, tag)


# -- one request's fault is not its batch-mates' (FC-03) -----------------------------------------------


@pytest.mark.parametrize("place", ["media", "preprocess", "forward"])
async def test_a_faulty_image_among_good_ones_fails_its_request_alone_and_as_a_whole(place: str) -> None:
    def prepare(raw: Image, tag: int) -> None:
        if tag == ODD and place == "preprocess":
            raise ValueError("too dark")

    faulty = data_url(ODD)
    if place == "media":
        faulty = "data:image/png;base64," + base64.b64encode(cut(png(ODD, 64, 64))).decode()
    backend = Told(prepare=prepare, forward=on(ODD, fail) if place == "forward" else nothing)
    async with site(backend) as server:
        parked = server.asking(data_url(0))
        await backend.gate.reached()
        one = server.asking(data_url(1))
        await server.queued(1)
        two = server.asking(data_url(21), data_url(22), faulty, data_url(24))
        if place == "forward":
            await server.queued(5)
        else:
            await asyncio.wait({two}, timeout=SOON_S)
        three, four = server.asking(data_url(3)), server.asking(data_url(4))
        await server.queued(7 if place == "forward" else 3)
        backend.gate.open()
        _, first, second, third, fourth = await all_of([parked, one, two, three, four])
        assert_own(first, 1)
        assert_own(third, 3)
        assert_own(fourth, 4)
    if place == "forward":
        assert code_of(second) == (500, "encoder_failed")
        assert set(backend.calls[1]) == {1, 21, 22, ODD, 24, 3, 4}
    else:
        assert code_of(second) == (400, "invalid_input")
        assert "image 3 of 4" in second.json()["error"]["message"]
        assert not {21, 22, ODD, 24} & {tag for call in backend.calls for tag in call}


# -- one result that is none (FC-05) -------------------------------------------------------------------


async def test_a_none_among_the_artifacts_fails_its_own_request_alone() -> None:
    class Gappy(Told):
        def forward_batch(self, items: Sequence[int], target_bucket: int | None = None) -> list[Any]:
            artifacts = super().forward_batch(items)
            return [None if tag == ODD else rows for tag, rows in zip(items, artifacts, strict=True)]

    backend = Gappy()
    async with site(backend) as server:
        parked = server.asking(data_url(0))
        await backend.gate.reached()
        asking = [server.asking(data_url(tag)) for tag in (1, ODD, 3)]
        await server.queued(3)
        backend.gate.open()
        _, one, two, three = await all_of([parked, *asking])
        assert_own(one, 1)
        assert code_of(two) == (500, "encoder_failed")
        assert_own(three, 3)
    assert sorted(backend.calls[1]) == [1, 3, ODD]


# -- what would end a thread (FC-07) -------------------------------------------------------------------


class Base(BaseException):
    """Neither an Exception nor one of the interpreter's."""


@pytest.mark.parametrize(
    "fault",
    [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(), Base("own")],
    ids=lambda fault: type(fault).__name__,
)
async def test_what_would_end_a_thread_ends_neither_the_server_nor_its_readiness(
    fault: BaseException,
) -> None:
    """Two requests in the batch that raises, three queued behind it, one afterwards."""

    def forward(items: Sequence[int]) -> None:
        if {1, 2} & set(items):
            raise fault

    backend = Told(forward=forward, max_batch_items=2)
    async with site(backend) as server:
        parked = server.asking(data_url(0))
        await backend.gate.reached()
        asking = []
        for tag in range(1, 6):
            asking.append(server.asking(data_url(tag)))
            await server.queued(tag)
        backend.gate.open()
        _, one, two, *behind = await all_of([parked, *asking])
        assert code_of(one) == code_of(two) == (500, "encoder_failed")
        for tag, reply in zip(range(3, 6), behind, strict=True):
            assert_own(reply, tag)
    assert backend.calls[:2] == [[0], [1, 2]]


# -- deadlines while another's forward runs (FC-16) ----------------------------------------------------


async def test_the_servers_deadline_passes_while_anothers_forward_runs() -> None:
    backend = Told()
    async with site(backend, limits=ServerLimits(request_timeout_s=1.0)) as server:
        parked = server.asking(data_url(1))
        await backend.gate.reached()
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        assert code_of(await server.ask(data_url(2))) == (504, "deadline_exceeded")
        assert 1.0 <= loop.time() - began_s < 5.0  # the gate is closed for four times that
        assert (await parked).status == 504
        backend.gate.open()
    assert backend.calls == [[1], [PLAIN]]


async def test_a_client_whose_own_deadline_passes_takes_its_images_along() -> None:
    backend = Told()
    async with site(backend) as server:
        parked = server.asking(data_url(1))
        await backend.gate.reached()
        with pytest.raises(asyncio.TimeoutError):
            await server.ask(data_url(2), timeout=aiohttp.ClientTimeout(total=0.5))
        await until(lambda: server.gauge("requests_in_flight") == 1)  # the gate is still closed
        backend.gate.open()
        assert_own(await parked, 1)
    assert backend.calls == [[1], [PLAIN]]


# -- clients who leave, and requests that have ended (FC-18) -------------------------------------------


def of_ours() -> collections.Counter[str]:
    """How many objects of our classes there are, but for connections, which their clients keep open."""
    gc.collect()
    modules = [(kind, str(kind.__module__)) for kind in map(type, gc.get_objects())]
    return collections.Counter(
        repr(kind)
        for kind, module in modules
        if module.startswith("retinue.") and module != "retinue.server.protocol"
    )


async def test_who_closed_its_connection_is_not_encoded_and_a_thousand_requests_leave_nothing() -> None:
    backend = Told()
    async with site(backend, limits=ServerLimits(artifact_cache_bytes=0)) as server:
        parked = server.asking(data_url(1))
        await backend.gate.reached()
        async with dialling(server.port) as leaver:
            await leaver.send(request(chat([image(2)])))
            await server.queued(1)
        await server.queued(0)
        backend.gate.open()
        assert_own(await parked, 1)
        await server.is_well()
        tasks, objects = len(asyncio.all_tasks()), of_ours()
        for number in range(0, 1000, 20):
            tags = range(10 + number % 100, 30 + number % 100)
            replies = await all_of([server.asking(data_url(tag)) for tag in tags])
            for tag, reply in zip(tags, replies, strict=True):
                assert_own(reply, tag)
        await server.is_well()
        assert len(asyncio.all_tasks()) == tasks
        assert of_ours() - objects == {}
    assert not any(2 in call for call in backend.calls)


# -- the siblings of an image that cannot be had (FC-19) -----------------------------------------------


async def test_fifty_requests_with_an_image_that_is_not_there_let_go_of_its_slow_siblings() -> None:
    async def failing(exchange: Exchange) -> None:
        await origin.until(lambda: origin.requests["/drip"] == 150)  # all siblings are under way
        await not_found(exchange)

    backend = Told()
    backend.gate.open()
    media = MediaPolicy(allow_private_addresses=True, fetch_timeout_s=3600)
    async with serving_origin() as origin, site(backend, media=media) as server:
        origin.routes["/failing"] = failing
        slow = [f"{origin.url('/drip')}#{number}" for number in range(3)]
        replies = await all_of([server.asking(*slow, origin.url("/failing")) for _ in range(50)])
        for reply in replies:
            assert code_of(reply) == (400, "invalid_input")
            assert reply.json()["error"]["message"] == "image 4 of 4: its URL answered 404"
        await origin.until(lambda: origin.open <= 50)  # those that answered may be kept
        assert (await server.ask(origin.url("/ok"))).status == 200
    assert len(backend.calls) == 2


# -- overload (FC-72) ----------------------------------------------------------------------------------


async def test_ten_rounds_of_overload_with_failures_and_leavers_leave_all_room_free() -> None:
    limit, picture = 3, png(1).ljust(2 * 2**20, b"\0")
    url = "data:image/png;base64," + base64.b64encode(picture).decode()
    body = chat([{"type": "image_url", "image_url": {"url": url}}])
    faults: list[Exception] = []

    def forward(_: Sequence[int]) -> None:
        if faults:
            raise faults[0]

    async def refused(server: Site) -> bytes:
        """The head of the answer to a request of which no more than its first bytes are sent."""
        async with dialling(server.port) as wire:
            await wire.send(request(body)[:200])
            return await wire.until(b"\r\n\r\n")

    backend = Told(forward=forward)
    limits = ServerLimits(max_concurrent_requests=limit, artifact_cache_bytes=0)
    async with site(backend, limits=limits) as server:
        for number in range(10):
            backend.gate = Gate()
            asking = [server.asking(url)]
            await backend.gate.reached()
            asking += [server.asking(url) for _ in range(limit - 1)]
            await server.queued(limit - 1)
            assert server.gauge("pending_bytes") <= limit * (len(body) + len(picture))
            for head in await asyncio.gather(*(refused(server) for _ in range(9 * limit))):
                assert head.startswith(b"HTTP/1.1 429 ")
                assert b"\r\nretry-after: " in head.lower()
            faults[:] = [RuntimeError("the device is lost")] if number % 3 == 1 else []
            if number % 3 == 2:
                asking.pop().cancel()
                await until(lambda: server.gauge("requests_in_flight") == limit - 1)
            backend.gate.open()
            for reply in await all_of(asking):
                if faults:
                    assert code_of(reply) == (500, "encoder_failed")
                else:
                    assert_own(reply, 1)
            faults.clear()
            await server.is_well()
    assert server.gauge("rejected") == 10 * 9 * limit


# -- a shutdown amid requests of every kind (FC-74) ----------------------------------------------------

#: ``program.py`` with a stream behind: its end comes once two batches have been encoded.
STREAMING = f"""
import asyncio, sys, threading
sys.path.insert(0, {str(Path(__file__).parent)!r})
import program
from retinue.server.serving import serve
from retinue.server.stack import Behind, Stack

batches, two_are_encoded = [], threading.Event()

class Told(program.Told):
    def forward_batch(self, items, target_bucket=None):
        artifacts = super().forward_batch(items)
        batches.append(len(items))
        if len(batches) == 2:
            two_are_encoded.set()
        return artifacts

    def close(self):
        program.say(f"encoded {{batches}}")
        super().close()

async def app(scope, receive, send):
    if scope["path"] != "/v1/completions":
        await program.app(scope, receive, send)
        return
    await send({{"type": "http.response.start", "status": 200, "headers": []}})
    await send({{"type": "http.response.body", "body": b"first", "more_body": True}})
    await asyncio.to_thread(two_are_encoded.wait)
    await send({{"type": "http.response.body", "body": b"last"}})

stack = Stack(Told(), "none", Behind(app), join_timeout_s=20)
sys.exit(serve(stack, "program", host="127.0.0.1", port=0, grace_s=float(sys.argv[1])))
"""


async def gauge(server: Process, name: str) -> float:
    """A figure among its metrics."""
    async with dialling(server.port) as wire:
        await wire.send(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        lines = (await wire.rest()).decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"retinue_{name} "))


async def test_a_signal_amid_requests_of_every_kind_leaves_nobody_without_an_answer() -> None:
    async with started("program", "-c", STREAMING, "20") as server:
        await server.ready()
        running = asyncio.create_task(server.ask(CHAT, chat([image(1)])))
        await server.line("forward")
        queued = [asyncio.create_task(server.ask(CHAT, chat([image(tag)]))) for tag in range(2, 7)]
        while await gauge(server, "pending_items") < 5:
            pass
        async with dialling(server.port) as stream, dialling(server.port) as upload:
            await stream.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
            assert (await stream.until(b"first")).startswith(b"HTTP/1.1 200")
            sent = request(chat("words alone"))
            await upload.send(sent[:-5])
            while await gauge(server, "requests_in_flight") < 8:  # until it has seen the upload begin
                pass
            async with dialling(server.port) as idle:
                await idle.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                assert (await idle.until(b'{"status":"ok"}')).startswith(b"HTTP/1.1 200")
                server.signal()
                while await accepts(server):
                    pass
                assert await idle.rest() == b""  # closed, for there was nothing to answer
            await upload.send(sent[-5:])
            assert (await upload.rest()).startswith(b"HTTP/1.1 200")
            server.go()
            await server.line("forward")
            server.go()
            for answer in await asyncio.wait_for(asyncio.gather(running, *queued), SOON_S):
                assert answer.startswith(b"HTTP/1.1 200")
            assert b"last" in await stream.rest()
        await server.line(r"encoded \[1, 5\]")
        await server.line("closed")
        assert await server.end() == 0


async def test_who_still_waits_at_the_end_of_the_grace_is_told_of_the_shutdown() -> None:
    async with program(1, "stuck") as server:
        await server.ready()
        running = asyncio.create_task(server.ask(CHAT, chat([image(1)])))
        await server.line("forward")
        queued = asyncio.create_task(server.ask(CHAT, chat([image(2)])))
        async with dialling(server.port) as upload:
            await upload.send(request(chat("words alone"))[:-5])
            while await gauge(server, "requests_in_flight") < 3:
                pass
            server.signal()
            answers = await asyncio.wait_for(asyncio.gather(running, queued, upload.rest()), SOON_S)
        for answer in answers:
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert orjson.loads(body)["error"]["code"] == "encoder_unavailable"
        assert await server.end() == 0
        assert "Traceback" not in await server.errors()
