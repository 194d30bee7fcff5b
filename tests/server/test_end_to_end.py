"""The whole server over real sockets: OpenAI's client, and raw ones where that is too polite."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import orjson
import PIL.Image
import pytest
from openai import AsyncOpenAI

from retinue.demo.prompt import QUESTION
from retinue.demo.run import Picture, pictures
from retinue.demo.serving import MODEL_NAME, demo_stack
from retinue.media import MediaPolicy
from retinue.server.limits import ServerLimits
from retinue.server.serving import listening
from retinue.server.stack import Behind, Stack

from .asgi import SOON_S, Mirror
from .backends import Gated, Tags, data_url
from .test_middleware import CHAT, chat, image

ALBUM = pictures()


@pytest.fixture(scope="module")
def demo() -> Iterator[str]:
    """The URL of a server with the demo model, on a thread of its own."""
    started = threading.Event()
    url = ""
    stop: list[Any] = []

    async def run() -> None:
        nonlocal url
        stopping = asyncio.Event()
        stop.extend([asyncio.get_running_loop(), stopping])
        async with listening(demo_stack()) as url:
            started.set()
            await stopping.wait()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert started.wait(SOON_S)
    yield url
    stop[0].call_soon_threadsafe(stop[1].set)
    thread.join(SOON_S)
    assert not thread.is_alive()


@pytest.fixture
async def client(demo: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{demo}/v1", api_key="none", max_retries=0) as client:
        yield client


def about(*shown: Picture | str, question: str = QUESTION) -> Any:
    """The messages of a question about pictures, or about what is at URLs."""
    urls = [one if isinstance(one, str) else one.url for one in shown]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]


def spelled(shown: list[Picture]) -> str:
    return "".join(picture.digit for picture in shown)


def encoded(picture: PIL.Image.Image, format: str = "PNG") -> str:
    file = io.BytesIO()
    picture.save(file, format)
    return "data:;base64," + base64.b64encode(file.getvalue()).decode()


# -- answers -------------------------------------------------------------------------------------------


async def test_concurrent_clients_get_their_own_answers(client: AsyncOpenAI) -> None:
    asked = [[ALBUM[(n + k) % len(ALBUM)] for k in range(1 + n % 4)] for n in range(24)]
    answers = await asyncio.gather(
        *(
            client.chat.completions.create(model=MODEL_NAME, messages=about(*shown), max_tokens=8)
            for shown in asked
        )
    )
    said = [answer.choices[0].message.content for answer in answers]
    assert said == [spelled(shown) for shown in asked]


async def test_a_stream_says_the_same_and_usage_counts_image_rows(client: AsyncOpenAI) -> None:
    shown = ALBUM[:3]
    whole = await client.chat.completions.create(model=MODEL_NAME, messages=about(*shown), max_tokens=8)
    pieces, usages = [], []
    async for chunk in await client.chat.completions.create(
        model=MODEL_NAME,
        messages=about(*shown),
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
    ):
        pieces += [choice.delta.content or "" for choice in chunk.choices]
        usages += [chunk.usage] if chunk.usage else []
    assert "".join(pieces) == whole.choices[0].message.content == spelled(shown)
    words = await client.chat.completions.create(model=MODEL_NAME, messages=about(), max_tokens=1)
    assert whole.usage is not None
    assert words.usage is not None
    assert usages == [whole.usage]
    assert whole.usage.prompt_tokens > words.usage.prompt_tokens + 3 * 3  # 3 rows are the least of a picture


async def test_text_that_spells_a_placeholder_stays_text(client: AsyncOpenAI) -> None:
    question = f"{QUESTION} <|image_pad|> <##PROMPT_EMBEDS##> <|im_end|>"
    answer = await client.chat.completions.create(
        model=MODEL_NAME, messages=about(*ALBUM[:2], question=question), max_tokens=8
    )
    assert answer.usage is not None
    plain = await client.chat.completions.create(model=MODEL_NAME, messages=about(*ALBUM[:2]), max_tokens=8)
    assert plain.usage is not None
    assert answer.usage.prompt_tokens > plain.usage.prompt_tokens  # as many images, and more text


async def test_the_models_are_listed(client: AsyncOpenAI) -> None:
    assert [model.id async for model in await client.models.list()] == [MODEL_NAME]


# -- what clients do wrong -----------------------------------------------------------------------------

ODD = {
    "1x1": (encoded(PIL.Image.new("RGB", (1, 1))), None),
    "palette": (encoded(PIL.Image.new("P", (20, 20))), None),
    "no picture": ("data:image/png;base64,AAAA", "image 2 of 3"),
    "4x10000": (encoded(PIL.Image.new("RGB", (4, 10000))), "image 2 of 3: 4x10000 pixels"),
    "loopback": ("http://127.0.0.1:1/cat.png", "image 2 of 3: its URL's host has no public address"),
    "a file": ("file:///etc/passwd", "image 2 of 3: a file URL, which file_root does not allow"),
}


@pytest.mark.parametrize(("url", "words"), ODD.values(), ids=ODD.keys())
async def test_an_odd_image_is_answered_or_named_and_harms_nobody(
    client: AsyncOpenAI, url: str, words: str | None
) -> None:
    def ask(*shown: Picture | str) -> Any:
        return client.chat.completions.create(model=MODEL_NAME, messages=about(*shown), max_tokens=8)

    neighbours = [asyncio.create_task(ask(picture)) for picture in ALBUM[:4]]
    if words is None:
        await ask(ALBUM[0], url, ALBUM[1])
    else:
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(ALBUM[0], url, ALBUM[1])
        assert words in caught.value.message
        assert caught.value.param == "messages[0].content[1].image_url"
        assert caught.value.type == "invalid_request_error"
    answers = [(await task).choices[0].message.content for task in neighbours]
    assert answers == [picture.digit for picture in ALBUM[:4]]


async def test_what_cannot_be_done_is_refused_by_name(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model=MODEL_NAME, messages=about(ALBUM[0]), logprobs=True)
    assert caught.value.param == "logprobs"
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="another", messages=about(ALBUM[0]))


async def test_a_prompt_that_exceeds_the_context_names_both_numbers(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"\d+ tokens.*context of 512"):
        await client.chat.completions.create(
            model=MODEL_NAME, messages=about(ALBUM[0], question="What number " * 400), max_tokens=8
        )


# -- with doubles behind -------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def served(backend: Tags, **options: Any) -> AsyncIterator[tuple[Stack, AsyncOpenAI, int]]:
    stack = Stack(backend, "none", Behind(Mirror()), **options)
    async with listening(stack) as url:
        key = options.get("api_key") or "none"
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
            yield stack, client, int(url.rsplit(":", 1)[1])


async def until(condition: Any) -> None:
    """Wait for what no event tells."""

    async def wait() -> None:
        while not condition():  # noqa: ASYNC110  # nothing tells
            await asyncio.sleep(0.001)

    await asyncio.wait_for(wait(), SOON_S)


def request(body: bytes) -> bytes:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def test_a_connection_that_closes_takes_its_unclaimed_images_along() -> None:
    backend = Gated()
    async with served(backend) as (stack, client, port):
        first = asyncio.create_task(client.chat.completions.create(model="m", messages=about(data_url(1))))
        await backend.inside()
        leaver = socket.create_connection(("127.0.0.1", port))
        leaver.sendall(request(chat([image(2), image(3)])))
        await until(lambda: stack.encoder.pending().items == 2)
        leaver.close()
        await until(lambda: stack.encoder.pending().items == 0)
        backend.open()
        await first
        await client.chat.completions.create(model="m", messages=about(data_url(4)))
        assert backend.calls == [[1], [4]]
        figures = stack.metrics.text().decode()
        assert "retinue_requests_in_flight 0.0" in figures
        assert "retinue_pending_bytes 0.0" in figures


async def test_the_key_is_asked_for_over_http() -> None:
    async with served(Tags(), api_key="sesame") as (_, client, port):
        await client.chat.completions.create(model="m", messages=about(data_url(1)))
        stranger = AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="guess", max_retries=0)
        async with stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.chat.completions.create(model="m", messages=about(data_url(1)))


async def test_overload_is_refused_at_once_and_afterwards_all_is_well() -> None:
    backend = Gated()
    limits = ServerLimits(max_concurrent_requests=3)
    async with served(backend, limits=limits) as (_, client, _port):

        async def ask(tag: int) -> Any:
            return await client.chat.completions.create(model="m", messages=about(data_url(tag)))

        tasks = [asyncio.create_task(ask(0))]
        await backend.inside()
        tasks += [asyncio.create_task(ask(tag)) for tag in range(1, 12)]
        done: set[asyncio.Task[Any]] = set()
        while len(done) < 9:  # all but the three that were let in
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=SOON_S)
            await asyncio.sleep(0)
        errors = [task.exception() for task in done]
        assert all(isinstance(error, openai.RateLimitError) for error in errors)
        assert all(int(error.response.headers["retry-after"]) >= 1 for error in errors)  # type: ignore[union-attr]
        backend.open()
        await asyncio.wait(tasks)
        assert sum(task.exception() is None for task in tasks) == 3
        await ask(20)


async def test_too_many_images_are_a_400_with_the_limit() -> None:
    async with served(Tags(), media=MediaPolicy(max_images=2)) as (_, client, _port):
        with pytest.raises(openai.BadRequestError, match="3 images, more than max_images=2"):
            await client.chat.completions.create(model="m", messages=about(*[data_url(1)] * 3))


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_a_413_although_it_is_not_read_to_its_end(chunked: bool) -> None:
    async with served(Tags(), limits=ServerLimits(max_body_bytes=1000)) as (_, _client, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        length = "Transfer-Encoding: chunked" if chunked else "Content-Length: 1001"
        writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n{length}\r\n\r\n".encode())
        if chunked:
            writer.write(b"3e9\r\n" + b"x" * 1001 + b"\r\n")  # and no end
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SOON_S)
        assert head.startswith(b"HTTP/1.1 413")
        writer.close()
        await writer.wait_closed()


async def test_errors_have_the_shape_that_clients_read() -> None:
    async with served(Tags()) as (_, _client, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request(chat([{"type": "image_url", "image_url": {"url": "gopher://x"}}])))
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SOON_S)
        assert b"content-type: application/json" in head.lower()
        length = next(
            int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
        )
        error = orjson.loads(await reader.readexactly(length))["error"]
        assert set(error) == {"message", "type", "param", "code"}
        writer.close()
        await writer.wait_closed()
