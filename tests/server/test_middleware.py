"""``EncodeImages``: images become embeddings in their places, and nothing else changes."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

import orjson
import pybase64
import pytest
import torch
from starlette.types import ASGIApp, Receive, Scope, Send

from retinue.encoder import AsyncVisionEncoder
from retinue.errors import DeadlineExceeded
from retinue.media import MediaLoader, MediaPolicy
from retinue.server.embeds import PARSED_REQUEST, Embeds
from retinue.server.middleware import EncodeImages, Ending

from .asgi import Client, Mirror, Reply, call
from .backends import WIDTH, Gated, Tags, data_url, png, rows_of

CHAT = "/v1/chat/completions"


class Told:
    """Keeps how requests ended."""

    def __init__(self) -> None:
        self.endings: list[tuple[int, Ending]] = []

    def __call__(self, images: int, ending: Ending) -> None:
        self.endings.append((images, ending))


@asynccontextmanager
async def encoding(
    app: ASGIApp, backend: Tags | None = None, *, policy: MediaPolicy | None = None, **options: Any
) -> AsyncIterator[EncodeImages]:
    """``EncodeImages`` in front of ``app``."""
    async with AsyncVisionEncoder(backend or Tags(), "none") as encoder, MediaLoader(policy) as media:
        yield EncodeImages(app, encoder=encoder, media=media, **options)


def image(tag: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(tag)}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def chat(*contents: Any, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": content} for content in contents]
    return orjson.dumps({"model": "m", "messages": messages, **fields})


def embeds(part: dict[str, Any]) -> torch.Tensor:
    """The tensor in a part, read as vLLM reads it."""
    assert part["type"] == "prompt_embeds"
    assert set(part) == {"type", "data"}
    tensor = torch.load(io.BytesIO(pybase64.b64decode(part["data"], validate=True)), weights_only=True)
    assert isinstance(tensor, torch.Tensor)
    return tensor


def contents_of(reply: Reply) -> list[Any]:
    assert reply.status == 200, reply.body
    return [message["content"] for message in reply.json()["messages"]]


# -- what changes --------------------------------------------------------------------------------------


async def test_image_parts_become_embeddings_in_their_places() -> None:
    body = chat([text("a"), image(1), text("b"), image(2), text("c")])
    async with encoding(Mirror()) as app:
        [content] = contents_of(await call(app, CHAT, body))
    assert [part["type"] for part in content] == ["text", "prompt_embeds", "text", "prompt_embeds", "text"]
    assert [part["text"] for part in content[::2]] == ["a", "b", "c"]
    assert torch.equal(embeds(content[1]), rows_of(1))
    assert torch.equal(embeds(content[3]), rows_of(2))


async def test_images_of_earlier_turns_stay_in_their_turns() -> None:
    body = chat([image(3), text("first")], "no image here", [text("second"), image(4)])
    async with encoding(Mirror()) as app:
        contents = contents_of(await call(app, CHAT, body))
    assert torch.equal(embeds(contents[0][0]), rows_of(3))
    assert contents[1] == "no image here"
    assert torch.equal(embeds(contents[2][1]), rows_of(4))


async def test_all_other_fields_stay_as_they_are() -> None:
    fields = {"temperature": 0.25, "tools": [{"type": "function"}], "unknown": {"image": None}, "n": 3}
    async with encoding(Mirror()) as app:
        reply = await call(app, CHAT, chat([image(1)], **fields))
    assert {name: reply.json()[name] for name in fields} == fields


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": data_url(5)},
        {"type": "image_url", "image_url": {"url": data_url(5), "detail": "high"}, "uuid": "7"},
    ],
    ids=["a bare string", "with detail"],
)
async def test_every_spelling_of_an_image_part_is_taken(part: dict[str, Any]) -> None:
    async with encoding(Mirror()) as app:
        [[got]] = contents_of(await call(app, CHAT, chat([part])))
    assert torch.equal(embeds(got), rows_of(5))


async def test_a_spelling_that_json_hides_is_found() -> None:
    body = chat([image(6)]).replace(b"image_url", rb"im\u0061ge_url").replace(b"image", rb"im\u0061ge")
    assert b"image" not in body
    async with encoding(Mirror()) as app:
        [[got]] = contents_of(await call(app, CHAT, body))
    assert torch.equal(embeds(got), rows_of(6))


async def test_the_new_length_is_announced() -> None:
    behind, body = Mirror(), chat([image(1)])
    headers = {"Content-Length": str(len(body)), "X-Other": "kept"}
    async with encoding(behind) as app:
        await call(app, CHAT, body, headers=headers)
    assert dict(behind.scopes[0]["headers"]) == {
        b"x-other": b"kept",
        b"content-length": b"%d" % len(behind.bodies[0]),
    }


async def test_every_request_gets_its_own_images() -> None:
    async with encoding(Mirror()) as app:
        tags = [list(range(start, start + 1 + start % 4)) for start in range(0, 600, 10)]
        bodies = [chat([image(tag) for tag in of_one]) for of_one in tags]
        replies = await asyncio.gather(*(call(app, CHAT, body) for body in bodies))
    for of_one, reply in zip(tags, replies, strict=True):
        [content] = contents_of(reply)
        got = [embeds(part) for part in content]
        assert all(torch.equal(rows, rows_of(tag)) for rows, tag in zip(got, of_one, strict=True))


# -- what does not -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "method", "body"),
    [
        (CHAT, "POST", b'{"messages": [ {"role":"user",  "content":"an image, in words"} ]}'),
        (CHAT, "POST", b'{"messages": "image"}'),
        (CHAT, "POST", b'{"messages": [["image"], {"content": ["image"]}, {"content": 5}, null]}'),
        (CHAT, "POST", b'["image"]'),
        (CHAT, "POST", b'{"image": no JSON at all'),
        (CHAT, "POST", b""),
        (CHAT, "PUT", chat([image(1)])),
        ("/v1/embeddings", "POST", chat([image(1)])),
    ],
    ids=["words", "messages", "odd messages", "a list", "no JSON", "empty", "PUT", "another path"],
)
async def test_what_has_no_image_part_passes_to_the_byte(path: str, method: str, body: bytes) -> None:
    behind, backend = Mirror(), Tags()
    async with encoding(behind, backend) as app:
        assert (await call(app, path, body, method=method)).body == body
    assert behind.bodies == [body]
    assert backend.calls == []


async def test_what_is_no_http_passes() -> None:
    seen: list[Scope] = []

    async def behind(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)

    client = Client("/")
    client.scope = {"type": "lifespan"}
    async with encoding(behind) as app:
        await client.call(app)
    assert seen == [{"type": "lifespan"}]


# -- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "param", "words"),
    [
        ({"type": "image_url"}, "messages[1].content[1].image_url", "'url'"),
        ({"type": "image_url", "image_url": {}}, "messages[1].content[1].image_url", "'url'"),
        ({"type": "image_url", "image_url": {"url": 5}}, "messages[1].content[1].image_url", "'url'"),
        (
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
            "messages[1].content[1].image_url",
            "image 2 of 2",
        ),
        ({"type": "prompt_embeds", "data": "AAAA"}, "messages[1].content[1]", "client_embeds"),
    ],
    ids=["no url", "empty", "no string", "no picture", "embeddings"],
)
async def test_a_bad_part_is_named(part: dict[str, Any], param: str, words: str) -> None:
    behind, backend = Mirror(), Tags()
    async with encoding(behind, backend) as app:
        reply = await call(app, CHAT, chat([text("a"), image(1)], [text("b"), part]))
    assert reply.status == 400
    error = reply.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"
    assert behind.bodies == []
    assert backend.calls == []


#: JSON that Python's own parser reads and stricter ones do not.
LAX = {
    "NaN": lambda body: body.replace(b'"model"', b'"x":NaN,"model"'),
    "half a pair": lambda body: body.replace(b'"model"', rb'"x":"\ud800","model"'),
    "UTF-16": lambda body: body.decode().encode("utf-16"),
    "a byte order mark": lambda body: b"\xef\xbb\xbf" + body,
}


@pytest.mark.parametrize("spelled", LAX.values(), ids=LAX.keys())
async def test_no_spelling_of_json_carries_a_part_past(spelled: Callable[[bytes], bytes]) -> None:
    behind = Mirror()
    async with encoding(behind) as app:
        refused = await call(app, CHAT, spelled(chat([{"type": "prompt_embeds", "data": "AAAA"}])))
        assert refused.status == 400
        assert behind.bodies == []
        assert (await call(app, CHAT, spelled(chat([image(1)])))).status == 200
    [part] = json.loads(behind.bodies[0])["messages"][0]["content"]
    assert torch.equal(embeds(part), rows_of(1))


async def test_clients_may_send_embeddings_where_the_server_says_so() -> None:
    part = {"type": "prompt_embeds", "data": "AAAA"}
    async with encoding(Mirror(), client_embeds=True) as app:
        [content] = contents_of(await call(app, CHAT, chat([part, image(1)])))
    assert content[0] == part
    assert torch.equal(embeds(content[1]), rows_of(1))


async def test_too_many_images_are_refused_before_any_is_looked_at() -> None:
    policy = MediaPolicy(max_images=2)
    nowhere = {"type": "image_url", "image_url": {"url": "gopher:"}}
    async with encoding(Mirror(), policy=policy) as app:
        reply = await call(app, CHAT, chat([nowhere] * 3))
    assert reply.status == 400
    assert reply.json()["error"]["message"] == "3 images, more than max_images=2"


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_over_the_limit_is_413(announced: bool) -> None:
    body = chat([image(1)])
    headers = {"Content-Length": str(len(body))} if announced else {}
    behind = Mirror()
    async with encoding(behind, max_body_bytes=len(body) - 1) as app:
        client = Client(CHAT, [body[:100], body[100:]], headers=headers)
        reply = await client.call(app)
        assert reply.status == 413
        assert f"max_body_bytes={len(body) - 1}" in reply.json()["error"]["message"]
        assert behind.bodies == []
    async with encoding(behind, max_body_bytes=len(body)) as app:
        assert (await call(app, CHAT, body, headers=headers)).status == 200


async def test_waiting_images_hold_no_more_than_their_budget() -> None:
    backend, body = Gated(), chat([image(1)])
    size = len(body) + len(png(1))
    async with encoding(Mirror(), backend, max_pending_bytes=2 * size - 1) as app:
        first = asyncio.create_task(call(app, CHAT, body))
        await backend.inside()
        refused = await call(app, CHAT, body)
        assert refused.status == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert app.budget.held_bytes == size
        backend.open()
        assert (await first).status == 200
        assert app.budget.held_bytes == 0
        assert (await call(app, CHAT, body)).status == 200


async def test_a_backend_that_fails_is_a_500_without_its_words(caplog: pytest.LogCaptureFixture) -> None:
    backend, told = Tags(), Told()
    backend.fault = RuntimeError("/etc/secret")
    async with encoding(Mirror(), backend, ended=told) as app:
        reply = await call(app, CHAT, chat([image(1)]))
        assert reply.status == 500
        assert reply.json()["error"]["code"] == "encoder_failed"
        assert b"secret" not in reply.body
        backend.fault = None
        assert (await call(app, CHAT, chat([image(1)]))).status == 200
    assert [(images, type(ending).__name__) for images, ending in told.endings] == [
        (1, "EncoderFailed"),
        (1, "str"),
    ]


async def test_a_fault_of_ours_is_not_told_as_a_client_that_left() -> None:
    class Faulty(MediaLoader):
        async def load(self, urls: Sequence[str], **options: Any) -> Any:
            raise RuntimeError("a fault of ours")

    told = Told()
    async with AsyncVisionEncoder(Tags(), "none") as encoder, Faulty() as media:
        app = EncodeImages(Mirror(), encoder=encoder, media=media, ended=told)
        with pytest.raises(RuntimeError, match="a fault of ours"):
            await call(app, CHAT, chat([image(1)]))
    assert told.endings == [(1, "failed")]


async def test_an_encoder_that_is_not_loaded_is_a_503() -> None:
    encoder: AsyncVisionEncoder[Any, Any, Any] = AsyncVisionEncoder(Tags())
    async with MediaLoader() as media:
        app = EncodeImages(Mirror(), encoder=encoder, media=media)
        reply = await call(app, CHAT, chat([image(1)]))
    assert reply.status == 503
    assert reply.json()["error"]["code"] == "encoder_unavailable"


@pytest.mark.parametrize(
    "artifact",
    [
        torch.zeros(3),
        torch.zeros(1, 3, 4),
        torch.zeros(0, 4),
        torch.zeros(2, 4, dtype=torch.int64),
        torch.full((2, 4), float("nan")),
        torch.full((2, 4), float("inf")),
        "rows",
    ],
    ids=["1-D", "3-D", "no rows", "ints", "NaN", "inf", "a string"],
)
async def test_an_artifact_that_is_no_embedding_goes_no_further(artifact: Any) -> None:
    class Odd(Tags):
        def forward_batch(self, items: Sequence[int], target_bucket: int | None = None) -> list[Any]:
            return [artifact for _ in items]

    behind = Mirror()
    async with encoding(behind, Odd()) as app:
        assert (await call(app, CHAT, chat([image(1)]))).status == 500
    assert behind.bodies == []


async def test_rows_of_another_width_than_the_models_go_no_further() -> None:
    behind = Mirror()
    async with encoding(behind) as app:
        app.width = WIDTH + 1
        reply = await call(app, CHAT, chat([image(1)]))
        assert (reply.status, reply.json()["error"]["code"]) == (500, "encoder_failed")
        assert behind.bodies == []
        app.width = WIDTH
        assert (await call(app, CHAT, chat([image(1)]))).status == 200


async def test_images_that_take_too_long_are_a_504_and_are_given_up() -> None:
    backend, told = Gated(), Told()
    async with encoding(Mirror(), backend, encode_timeout_s=0.05, ended=told) as app:
        first = asyncio.create_task(call(app, CHAT, chat([image(1)])))
        await backend.inside()
        late = await call(app, CHAT, chat([image(2)]))  # the deadline itself is the thing tested
        assert (late.status, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert "encode_timeout_s=0.05" in late.json()["error"]["message"]
        assert (await first).status == 504
        backend.open()
    async with encoding(Mirror(), encode_timeout_s=60) as app:
        assert (await call(app, CHAT, chat([image(3)]))).status == 200
    assert backend.calls == [[1]]
    assert [type(ending) for _, ending in told.endings] == [DeadlineExceeded] * 2


async def test_a_large_body_is_read_like_a_small_one() -> None:
    long = "x" * 2**20
    async with encoding(Mirror()) as app:
        replies = await asyncio.gather(*(call(app, CHAT, chat([text(long), image(tag)])) for tag in range(4)))
    for tag, reply in enumerate(replies):
        [[said, part]] = contents_of(reply)
        assert said == text(long)
        assert torch.equal(embeds(part), rows_of(tag))


@pytest.mark.parametrize(("rows", "on_the_loop"), [(2, True), (20_000, False)], ids=["small", "large"])
async def test_only_small_embeddings_are_written_on_the_event_loop(rows: int, on_the_loop: bool) -> None:
    class Sized(Tags):
        def forward_batch(self, items: Sequence[int], target_bucket: int | None = None) -> list[Any]:
            return [torch.full((rows, WIDTH), float(tag)) for tag in items]

    writers: list[threading.Thread] = []
    write = Embeds.text

    def noted(of_one: Embeds, width: int | None) -> str:
        writers.append(threading.current_thread())
        return write(of_one, width)

    with mock.patch.object(Embeds, "text", noted):
        async with encoding(Mirror(), Sized()) as app:
            [content] = contents_of(await call(app, CHAT, chat([image(1), image(2)])))
    assert [embeds(part)[-1].tolist() for part in content] == [[1.0] * WIDTH, [2.0] * WIDTH]
    assert [thread is threading.current_thread() for thread in writers] == [on_the_loop] * 2


async def test_an_app_that_takes_artifacts_gets_them_as_they_are() -> None:
    seen: list[Any] = []

    async def behind(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((scope.get(PARSED_REQUEST), (await receive())["body"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async with encoding(behind, artifacts=True) as app:
        await call(app, CHAT, chat([image(1), text("a"), image(2)]))
        await call(app, CHAT, chat([text("a")]))
    (request, body), untouched = seen
    first, words, second = request["messages"][0]["content"]
    assert body == b""
    assert words == text("a")
    assert torch.equal(first["data"].rows(), rows_of(1))
    assert (second["data"].number, second["data"].count) == (2, 2)
    assert torch.equal(second["data"].rows(), rows_of(2))
    assert untouched == (None, chat([text("a")]))


async def test_a_view_brings_only_its_own_rows_along() -> None:
    class Views(Tags):
        def forward_batch(self, items: Sequence[int], target_bucket: int | None = None) -> list[Any]:
            return [torch.arange(400_000.0).view(1000, 400)[:, :4][5:7] for _ in items]

    async with encoding(Mirror(), Views()) as app:
        [[part]] = contents_of(await call(app, CHAT, chat([image(1)])))
    assert embeds(part).shape == (2, 4)
    assert len(part["data"]) < 4000


# -- leaving -------------------------------------------------------------------------------------------


async def test_a_client_who_leaves_takes_its_unclaimed_images_along() -> None:
    backend, told = Gated(), Told()
    async with AsyncVisionEncoder(backend, "none") as encoder, MediaLoader() as media:
        app = EncodeImages(Mirror(), encoder=encoder, media=media, ended=told)
        first = asyncio.create_task(call(app, CHAT, chat([image(1)])))
        await backend.inside()
        leaver = Client(CHAT, chat([image(2), image(3)]))
        leaving = asyncio.create_task(leaver.call(app))
        stayer = asyncio.create_task(call(app, CHAT, chat([image(4)])))
        while encoder.pending().items < 3:  # noqa: ASYNC110  # nothing tells when an item begins to wait
            await asyncio.sleep(0)
        leaver.leave()
        assert (await leaving).status is None  # there is nobody to answer
        backend.open()
        assert [(await first).status, (await stayer).status] == [200, 200]
    assert backend.calls == [[1], [4]]
    assert told.endings[0] == (2, "left")
    assert app.budget.held_bytes == 0


async def test_a_client_who_leaves_during_the_upload_is_not_answered() -> None:
    behind = Mirror()
    client = Client(CHAT, [b'{"messages": '])
    client.leave()

    async def receive() -> dict[str, Any]:
        message = await client._receive()
        return {**message, "more_body": True}

    async with encoding(behind) as app:
        await app(client.scope, receive, client._send)
    assert client.reply.status is None
    assert behind.bodies == []


async def test_the_app_behind_hears_of_the_leaving_too() -> None:
    heard = asyncio.Event()
    inside = asyncio.Event()

    async def behind(scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "http.request"
        inside.set()
        assert (await receive())["type"] == "http.disconnect"
        assert (await receive())["type"] == "http.disconnect"
        heard.set()

    async with encoding(behind) as app:
        client = Client(CHAT, chat([image(1)]))
        task = asyncio.create_task(client.call(app))
        await inside.wait()
        client.leave()
        await task
    assert heard.is_set()


async def test_a_thousand_requests_of_whom_a_third_leave_leave_nothing_behind() -> None:
    async def one(number: int) -> None:
        client = Client(CHAT, chat([image(number % 200)]))
        if number % 3 == 0:
            client.leave()
        await client.call(app)

    backend = Tags()
    async with AsyncVisionEncoder(backend, "none") as encoder, MediaLoader() as media:
        app = EncodeImages(Mirror(), encoder=encoder, media=media)
        await one(1)
        tasks = len(asyncio.all_tasks())
        for start in range(0, 1000, 50):
            await asyncio.gather(*(one(number) for number in range(start, start + 50)))
        assert len(asyncio.all_tasks()) == tasks
        assert app.budget.held_bytes == 0
        assert encoder.pending().items == 0
