"""Mixed clients: those who want an answer, those who lie, those who err, those who leave.

What a client does next is a function of the seed, of its number, and of how often it came before.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import io
import json
import random
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import aiohttp
import httpx2
import openai
import orjson
import PIL.Image
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from retinue.demo.prompt import QUESTION, Label, answer, questions
from retinue.demo.run import Picture
from retinue.demo.serving import MODEL_NAME

from .faults import Mark
from .origins import BAD, GOOD, Gallery
from .upstream import Trouble, reset
from .verdict import Answer, Asked

__all__ = ["Load", "Site", "Sure"]

PATH = "/v1/chat/completions"

#: A client that stays has an answer by then, or the server has let it down.
_PATIENCE_S = 30.0
_THINKING_S = 0.05
_TURNS_PER_S = 0.75  # of each client, at least: where the cores are slow or taken, a load lasts longer
_IDLE_S = 1.0  # a connection; below the server's keep-alive, so that no request meets a closing one
_SLOW_S = 0.03  # between the pieces of a client that takes its time

_KINDS = ("spell", "count", "nth digit", "largest")  # of question; its answer follows from the digits alone
_LONG_QUESTION = questions(1)["list colors"][0]  # whose answer takes a while
_TYPES = ("image/png", "image/jpeg", "IMAGE/GIF;charset=utf-8", "text/html", "")  # none is believed


@dataclass(frozen=True)
class Sure:
    """A question about pictures that the model answers right in calm."""

    pictures: tuple[Picture, ...]
    question: str

    @classmethod
    def drawn(cls, rng: random.Random, album: Sequence[Picture]) -> Sure:
        """One that may be: to be asked in calm."""
        shown = tuple(rng.choices(album, k=rng.randint(1, 4)))
        return cls(shown, rng.choice(questions(len(shown))[rng.choice(_KINDS)]))

    @property
    def answer(self) -> str:
        """What is right."""
        return answer(self.question, [Label(int(picture.digit), "") for picture in self.pictures])


class Site:
    """A server under load, and all that was asked of it and came of it."""

    def __init__(self, url: str, *, through_proxy: bool) -> None:
        self.url = url
        self.port = int(url.rpartition(":")[2])
        self.through_proxy = through_proxy
        self.floods: list[Trouble] = []
        self.ended: list[tuple[Asked, Answer]] = []
        #: Clients by the stage that they are known to have left at, and those who came too late for that.
        self.left: Counter[str] = Counter()
        self.missed: Counter[str] = Counter()

    def forget(self) -> None:
        """Begin anew, once all has been judged."""
        self.floods, self.ended = [], []
        self.left, self.missed = Counter(), Counter()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Site]:
        """Its connections, for the length of the ``async with``."""
        timeout = aiohttp.ClientTimeout(total=_PATIENCE_S)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S)
        limits = httpx2.Limits(keepalive_expiry=_IDLE_S)
        self.client = AsyncOpenAI(
            base_url=f"{self.url}/v1",
            api_key="none",
            max_retries=0,
            timeout=_PATIENCE_S,
            http_client=DefaultAsyncHttpxClient(limits=limits),
        )
        async with self.client, aiohttp.ClientSession(connector=connector, timeout=timeout) as self.session:
            yield self

    async def reached(self, tag: str, stage: str) -> bool:
        """Wait until a picture of this request is there; False if it never is."""
        params = {"tag": tag, "stage": stage}
        async with self.session.get(f"{self.url}/chaos/reached", params=params) as response:
            return response.status == 200


def data_url(data: bytes, media_type: str = "") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def chat(urls: Sequence[str], question: str = QUESTION, **more: Any) -> dict[str, Any]:
    """The body of a request about what is at ``urls``."""
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*parts, {"type": "text", "text": question}]
    return {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 8,
        "temperature": 0,
        **more,
    }


# -- asking, and staying -------------------------------------------------------------------------------


async def by_openai(site: Site, body: Mapping[str, Any]) -> Answer:
    """Through OpenAI's own client; a stream if the body says so."""
    began_s = time.monotonic()
    text, whole = "", False

    def came(status: int, **what: Any) -> Answer:
        return Answer(status=status, began_s=began_s, ended_s=time.monotonic(), text=text, **what)

    try:
        if body.get("stream"):
            async for chunk in await site.client.chat.completions.create(**body):
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    whole = choice.finish_reason is not None
            return came(200, whole=whole)
        completion = await site.client.chat.completions.create(**body)
        text = completion.choices[0].message.content or ""
        return came(200)
    except openai.APIStatusError as error:
        return came(
            error.status_code, error=error.body, retry_after=error.response.headers.get("retry-after")
        )
    except (openai.APIConnectionError, httpx2.TransportError):
        return came(200 if text else 0, whole=False)
    except json.JSONDecodeError:  # it broke off within an event
        return came(200, whole=False)
    except openai.APIError as error:  # an event of the stream
        return came(200, error=error.body, whole=False)


async def by_hand(
    site: Site, data: Any, path: str = PATH, method: str = "POST", pause_s: float = 0
) -> Answer:
    """Through a client that knows nothing of OpenAI; ``pause_s`` between the pieces that it reads."""
    began_s = time.monotonic()
    status, received, whole, retry_after = 0, bytearray(), False, None
    try:
        async with site.session.request(method, site.url + path, data=data) as response:
            status, retry_after = response.status, response.headers.get("Retry-After")
            while piece := await response.content.read(64 if pause_s else 2**16):
                received += piece
                await asyncio.sleep(pause_s)
            whole = True
    except (aiohttp.ClientError, asyncio.TimeoutError):
        pass
    text, error = "", None
    if status == 200:
        text, whole, error = _read(bytes(received), whole)
    elif whole:
        with contextlib.suppress(orjson.JSONDecodeError, KeyError):
            error = orjson.loads(received)["error"]
    return Answer(
        status=status,
        began_s=began_s,
        ended_s=time.monotonic(),
        text=text,
        error=error,
        whole=whole,
        retry_after=retry_after,
    )


def _read(received: bytes, whole: bool) -> tuple[str, bool, Any]:
    """The text of an answer or of a stream of events, whether that is all of it, and the error in it."""
    if not received.startswith(b"data:"):
        if not whole:
            return "", False, None
        return orjson.loads(received)["choices"][0]["message"]["content"] or "", True, None
    text, done = "", False
    for line in received.decode(errors="replace").split("\n\n"):
        data = line.strip().removeprefix("data: ")
        if data == "[DONE]":
            done = True
        with contextlib.suppress(orjson.JSONDecodeError):
            event = orjson.loads(data)
            if "error" in event:
                return text, False, event["error"]
            text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    return text, whole and done, None


async def slowly(data: bytes) -> AsyncIterator[bytes]:
    """``data`` in pieces that take their time."""
    size = -(-len(data) // 8)
    for begin in range(0, len(data), size):
        yield data[begin : begin + size]
        await asyncio.sleep(_SLOW_S)


# -- lies and errors -----------------------------------------------------------------------------------


def _png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    PIL.Image.new("L", (width, height)).save(file, "PNG")
    return file.getvalue()


_SMALL = _png(1, 1)
_BOMB = _SMALL[:16] + struct.pack(">II", 60_000, 60_000) + _SMALL[24:]

#: URLs that claim to be of a picture, made of the data of a good one; each is refused.
LIES: Mapping[str, Callable[[bytes], str]] = MappingProxyType(
    {
        "truncated": lambda data: data_url(data[: len(data) // 2], "image/png"),
        "bomb": lambda _: data_url(_BOMB, "image/png"),
        "narrow": lambda _: data_url(_png(4, 4000), "image/png"),
        "html": lambda _: data_url(b"<html><img src='x'></html>", "image/png"),
        "svg": lambda _: data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"),
        "gzipped": lambda data: data_url(gzip.compress(data), "image/png"),
        "zeros": lambda _: data_url(bytes(1000), "image/jpeg"),
        "nothing": lambda _: data_url(b"", "image/png"),
        "no base64": lambda _: "data:image/png;base64,@@@@",
        "no scheme": lambda data: base64.b64encode(data).decode(),
        "gopher": lambda _: "gopher://127.0.0.1/1",
        "file": lambda _: "file:///etc/passwd",
        "nobody there": lambda _: "http://127.0.0.1:1/cat.png",
    }
)

#: Requests about some URLs that are wrong: their body, status, a part of the error's message, its param.
ERRORS: Sequence[tuple[Callable[[Sequence[str]], bytes], int, str, str | None]] = (
    (lambda _: b"{", 400, "not JSON", None),
    (lambda _: b'["image_url"]', 400, "no JSON object", None),
    (lambda urls: orjson.dumps(chat(urls, logprobs=True)), 400, "logprobs", "logprobs"),
    (lambda urls: orjson.dumps(chat(urls, temperature=-1)), 400, "temperature", "temperature"),
    (lambda urls: orjson.dumps(chat(urls, max_tokens=0)), 400, "max_tokens", "max_tokens"),
    (lambda urls: orjson.dumps(chat(urls, model="another")), 404, "no model", "model"),
    (lambda urls: orjson.dumps(chat([urls[0]] * 9)), 400, "9 images, more than max_images=8", None),
    (lambda urls: orjson.dumps(chat(urls, "What number " * 400)), 400, "context of", "messages"),
    (
        lambda _: b'{"messages": [{"content": [{"type": "image_url"}]}]}',
        400,
        "an image_url part needs",
        "messages[0].content[0].image_url",
    ),
    (
        lambda _: b'{"messages": [{"content": [{"type": "prompt_embeds", "data": "AAAA"}]}]}',
        400,
        "not taken from clients",
        "messages[0].content[0]",
    ),
)


# -- the clients ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Visit:
    """One turn of one client."""

    site: Site
    rng: random.Random
    tag: str
    sure: Sure

    def marked(self, trouble: str = "") -> list[bytes]:
        """The pictures, with this visit's mark; one of them brings ``trouble``."""
        culprit = self.rng.randrange(len(self.sure.pictures))
        return [
            Mark(self.tag, trouble if n == culprit else "", str(n)).on(picture.data)
            for n, picture in enumerate(self.sure.pictures)
        ]

    def urls(self, trouble: str = "") -> list[str]:
        """The same, as data URLs of any media type."""
        return [data_url(data, self.rng.choice(_TYPES)) for data in self.marked(trouble)]

    def body(self, trouble: str = "", **more: Any) -> dict[str, Any]:
        """A request about the pictures."""
        return chat(self.urls(trouble), self.sure.question, **more)

    def asked(self, kind: str, **earns: Any) -> Asked:
        """What it earns: by default the right answer."""
        says = self.sure.answer if earns.get("status", 200) == 200 else ""
        fields: dict[str, Any] = {"tag": self.tag, "says": says, "through_proxy": self.site.through_proxy}
        return Asked(kind=kind, **fields | earns)

    def told(self, asked: Asked, answer: Answer) -> None:
        """Keep it, to be judged."""
        self.site.ended.append((asked, answer))


class Load:
    """Clients of several sites. ``name``: no other load's; it is in tags. ``sure``: what they may ask for."""

    def __init__(
        self, seed: str, name: str, sites: Sequence[Site], gallery: Gallery, sure: Sequence[Sure]
    ) -> None:
        self._seed = f"{seed}/{name}"
        self._name = name
        self._sites = sites
        self._gallery = gallery
        self._sure = sure

    async def run(self, clients: int, seconds: float) -> None:
        """So many clients at once, for so long at least; returns when the last has its answer."""
        until_s, turns = time.monotonic() + seconds, int(seconds * _TURNS_PER_S)
        await asyncio.gather(*(self._client(number, until_s, turns) for number in range(clients)))

    async def flood(self, site: Site, requests: int) -> None:
        """More requests at once than ``site`` takes."""
        rng = random.Random(f"{self._seed}/flood/{len(site.floods)}")
        flood = Trouble("flood", time.monotonic())
        site.floods.append(flood)
        visits = [
            Visit(site, rng, f"{self._name}.f{len(site.floods)}.{n}", rng.choice(self._sure))
            for n in range(requests)
        ]
        await asyncio.gather(*(wants_an_answer(visit, self._gallery) for visit in visits))
        flood.ended_s = time.monotonic()

    async def _client(self, number: int, until_s: float, turns: int) -> None:
        rng = random.Random(f"{self._seed}/{number}")
        turn = 0
        while turn < turns or time.monotonic() < until_s:
            turn += 1
            tag = f"{self._name}.{number}.{turn}"
            visit = Visit(rng.choice(self._sites), rng, tag, rng.choice(self._sure))
            act = rng.choices([*ACTS], [*ACTS.values()])[0]
            await act(visit, self._gallery)
            await asyncio.sleep(rng.random() * _THINKING_S)


async def wants_an_answer(visit: Visit, gallery: Gallery) -> None:
    """OpenAI's client, whole or streamed."""
    stream = visit.rng.random() < 0.4
    answer = await by_openai(visit.site, visit.body(stream=stream))
    visit.told(visit.asked("stream" if stream else "chat"), answer)


async def wants_an_answer_about_urls(visit: Visit, gallery: Gallery) -> None:
    """Its pictures are at an origin that is good, in one manner or another."""
    with contextlib.ExitStack() as stack:
        manners = visit.rng.choices([*GOOD], k=len(visit.sure.pictures))
        urls = [
            stack.enter_context(gallery.hung(data, manner))
            for data, manner in zip(visit.marked(), manners, strict=True)
        ]
        answer = await by_openai(visit.site, chat(urls, visit.sure.question))
    visit.told(visit.asked("by URL"), answer)


async def takes_its_time(visit: Visit, gallery: Gallery) -> None:
    """Sends slowly, or reads slowly."""
    data = orjson.dumps(visit.body(stream=True))
    if visit.rng.random() < 0.5:
        visit.told(visit.asked("slow upload"), await by_hand(visit.site, slowly(data)))
    else:
        visit.told(visit.asked("slow reader"), await by_hand(visit.site, data, pause_s=_SLOW_S))


async def shows_nothing(visit: Visit, gallery: Gallery) -> None:
    """Has no picture, only words."""
    answer = await by_openai(visit.site, chat([], "How many images are there?"))
    visit.told(visit.asked("no picture", tag="", says=None), answer)


async def lies(visit: Visit, gallery: Gallery) -> None:
    """One of its pictures is none."""
    kind = visit.rng.choice([*LIES])
    urls = visit.urls()
    at = visit.rng.randrange(len(urls) + 1)
    urls.insert(at, LIES[kind](visit.sure.pictures[0].data))
    await _is_told_which(visit, f"lie: {kind}", urls, at, "")


async def trusts_a_bad_origin(visit: Visit, gallery: Gallery) -> None:
    """One of its pictures is where there is none."""
    path = visit.rng.choice([*BAD])
    urls = visit.urls()
    at = visit.rng.randrange(len(urls) + 1)
    urls.insert(at, gallery.origin.url(path))
    await _is_told_which(visit, f"origin: {path}", urls, at, BAD[path])


async def _is_told_which(visit: Visit, kind: str, urls: list[str], at: int, why: str) -> None:
    answer = await by_openai(visit.site, chat(urls, visit.sure.question, stream=visit.rng.random() < 0.3))
    earned = visit.asked(
        kind,
        status=400,
        says=f"image {at + 1} of {len(urls)}: {why}",
        code="invalid_input",
        param=f"messages[0].content[{at}].image_url",
    )
    visit.told(earned, answer)


async def errs(visit: Visit, gallery: Gallery) -> None:
    """Its request is wrong."""
    written, status, says, param = visit.rng.choice(ERRORS)
    answer = await by_hand(visit.site, written(visit.urls()))
    visit.told(visit.asked(f"error: {says}", status=status, says=says, param=param), answer)


async def loses_its_way(visit: Visit, gallery: Gallery) -> None:
    """Wrong path or method."""
    path, method, status = visit.rng.choice(
        [("/v1/nothing", "POST", 404), (PATH, "DELETE", 405), ("/v1/models/another", "GET", 404)]
    )
    answer = await by_hand(visit.site, None, path, method)
    visit.told(visit.asked(f"{method} {path}", tag="", status=status), answer)


#: What a picture does to the backend, and what its request earns by it.
TROUBLES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "raise": {"status": 500, "code": "encoder_failed"},
        "exit": {"status": 500, "code": "encoder_failed"},
        "short": {"status": 500, "code": "encoder_failed"},
        "memory": {"status": 500, "code": "encoder_failed"},
        "greedy memory": {},
        "nan": {"status": 500, "code": "encoder_failed"},
        "key error": {"status": 500, "code": "encoder_failed"},
        "value error": {"status": 400, "code": "invalid_input", "says": "was refused by preprocess"},
        "pause in preprocess": {},
        "pause in forward": {},
    }
)


async def brings_trouble(visit: Visit, gallery: Gallery) -> None:
    """One of its pictures does something to the backend."""
    trouble = visit.rng.choice([*TROUBLES])
    answer = await by_openai(visit.site, visit.body(trouble))
    visit.told(visit.asked(f"trouble: {trouble}", **TROUBLES[trouble]), answer)


# -- those who leave -----------------------------------------------------------------------------------


class Wire:
    """A connection that its client may leave at any byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer

    @classmethod
    async def to(cls, site: Site) -> Wire:
        return cls(*await asyncio.open_connection("127.0.0.1", site.port))

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()

    async def comes(self, mark: bytes) -> bool:
        """Whether ``mark`` comes before the end."""
        with contextlib.suppress(asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            await self.reader.readuntil(mark)
            return True
        return False

    def leave(self, *, abruptly: bool) -> None:
        """Close the connection, by an RST if ``abruptly``."""
        if abruptly:
            reset(self._writer)
        self._writer.close()


def request(body: Mapping[str, Any]) -> bytes:
    data = orjson.dumps(body)
    return f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


async def leaves(visit: Visit, gallery: Gallery) -> None:
    """Hangs up at one stage or another."""
    stage = visit.rng.choice([*STAGES])
    wire = await Wire.to(visit.site)
    try:
        there = await asyncio.wait_for(STAGES[stage](visit, gallery, wire), _PATIENCE_S)
    finally:
        wire.leave(abruptly=visit.rng.random() < 0.5)
    (visit.site.left if there else visit.site.missed)[stage] += 1


async def _in_the_head(visit: Visit, gallery: Gallery, wire: Wire) -> bool:
    sent = request(visit.body())
    await wire.send(sent[: visit.rng.randrange(1, sent.index(b"\r\n\r\n"))])
    return True


async def _in_the_body(visit: Visit, gallery: Gallery, wire: Wire) -> bool:
    sent = request(visit.body())
    await wire.send(sent[: visit.rng.randrange(sent.index(b"\r\n\r\n") + 4, len(sent))])
    return True


async def _while_fetching(visit: Visit, gallery: Gallery, wire: Wire) -> bool:
    path = visit.rng.choice(("/silent", "/drip"))
    origin = gallery.origin
    before = origin.requests[path]
    await wire.send(request(chat([*visit.urls(), origin.url(path)])))
    with contextlib.suppress(asyncio.TimeoutError):  # refused before
        await origin.until(lambda: origin.requests[path] > before)
        return True
    return False


async def _in_preprocess(visit: Visit, gallery: Gallery, wire: Wire) -> bool:
    await wire.send(request(visit.body("pause in preprocess")))
    return await visit.site.reached(visit.tag, "preprocess")


async def _in_the_queue(visit: Visit, gallery: Gallery, wire: Wire) -> bool:
    """Behind somebody who stays, and whose call takes a while."""
    ahead = Visit(visit.site, visit.rng, f"{visit.tag}a", visit.sure)
    staying = asyncio.create_task(by_openai(visit.site, ahead.body("pause in forward")))
    try:
        await visit.site.reached(ahead.tag, "forward")
        await wire.send(request(visit.body("followed")))
        there = await visit.site.reached(visit.tag, "queue")
        wire.leave(abruptly=visit.rng.random() < 0.5)
    finally:
        ahead.told(ahead.asked("ahead of a leaver"), await staying)
    return there


async def _in_the_forward(visit: Visit, gallery: Gallery, wire: Wire) -> bool:
    await wire.send(request(visit.body("pause in forward")))
    return await visit.site.reached(visit.tag, "forward")


async def _before_the_answer_is_read(visit: Visit, gallery: Gallery, wire: Wire) -> bool:
    await wire.send(request(visit.body()))
    return await wire.comes(b"HTTP/1.1 ")


async def _in_the_stream(visit: Visit, gallery: Gallery, wire: Wire) -> bool:
    body = chat(visit.urls(), _LONG_QUESTION, stream=True, max_tokens=128)
    await wire.send(request(body))
    return await wire.comes(b"data: ")


STAGES: Mapping[str, Callable[[Visit, Gallery, Wire], Awaitable[bool]]] = MappingProxyType(
    {
        "in the head": _in_the_head,
        "in the body": _in_the_body,
        "while fetching": _while_fetching,
        "in preprocess": _in_preprocess,
        "in the queue": _in_the_queue,
        "in the forward": _in_the_forward,
        "before the answer is read": _before_the_answer_is_read,
        "in the stream": _in_the_stream,
    }
)

#: What a client may do, and how often it does.
ACTS: Mapping[Callable[[Visit, Gallery], Awaitable[None]], int] = MappingProxyType(
    {
        wants_an_answer: 40,
        wants_an_answer_about_urls: 10,
        takes_its_time: 6,
        shows_nothing: 3,
        lies: 12,
        trusts_a_bad_origin: 6,
        errs: 6,
        loses_its_way: 2,
        brings_trouble: 8,
        leaves: 20,
    }
)
