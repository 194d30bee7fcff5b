"""``EncodeImages``: image parts of chat requests go in, ``prompt_embeds`` parts come out.

An ASGI middleware. In a POST to ``…/chat/completions`` it replaces each part

    {"type": "image_url", "image_url": {"url": "https://… or data:…"}}

in its place by vLLM's public format for embeddings,

    {"type": "prompt_embeds", "data": "<base64 of torch.save of a (rows, hidden) tensor>"}

and gives everything else on to the app behind, untouched to the byte. So that app may be vLLM's own server, a
proxy to any server that takes such parts, or the embedded decoder.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import orjson
from starlette.types import ASGIApp, Receive, Scope, Send

from retinue.encoder import AsyncVisionEncoder
from retinue.errors import DeadlineExceeded, InvalidInput, RetinueError
from retinue.media import MediaLoader
from retinue.server.budget import ByteBudget
from retinue.server.connection import BodyTooLarge, ClientLeft, Connection
from retinue.server.embeds import PARSED_REQUEST, Embeds, soon_written
from retinue.server.errors import error_response, refusal
from retinue.server.interruption import Interruption

__all__ = ["EncodeImages", "Ended", "Ending"]

#: How the images of a request ended: in artifacts, in an error of the tree, by a fault outside of it, or
#: because their client left (or a deadline passed, which cancels as leaving does).
Ending: TypeAlias = Literal["ok", "failed", "left"] | RetinueError

T = TypeVar("T")

_SUFFIX = "/chat/completions"
# Up to here parsing takes less of the event loop's time than handing it to a thread and back. What is larger
# goes one by one: the parser holds the interpreter's lock, and several would take turns with the event loop.
_SOON_PARSED_BYTES = 2**18


class Ended(Protocol):
    """Is told how each request with images ended, and how many there were."""

    def __call__(self, images: int, ending: Ending) -> None:
        """On the event loop, once per request; must be quick."""


@dataclass(frozen=True)
class _ImagePart:
    part: dict[str, Any]  # of the parsed request; to be replaced in place
    param: str
    url: str


class EncodeImages:
    """Puts the images of chat requests through ``encoder``, in front of ``app``.

    The life of ``encoder`` and ``media`` is their owner's. ``max_body_bytes``: of one request, else 413.
    ``max_pending_bytes``: of the bodies and pictures of all requests that wait, else 429.
    ``client_embeds``: let clients send ``prompt_embeds`` parts of their own. They are as dangerous as the
    server behind is trusting: vLLM's engine dies of a wrong width, for everybody.
    ``artifacts``: ``app`` is an ``EmbeddedApp``, which takes the parsed request with the artifacts in it; so
    they need not be written and read again.
    ``place``: text that the server behind would take for the place of an image, wherever it stands; refused.
    ``encode_timeout_s``: from a request's last byte until its images are embeddings, else 504.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        encoder: AsyncVisionEncoder[Any, Any, Any],
        media: MediaLoader,
        max_body_bytes: int = 64 * 2**20,
        max_pending_bytes: int = 2**30,
        client_embeds: bool = False,
        artifacts: bool = False,
        place: str = "",
        encode_timeout_s: float | None = None,
        ended: Ended | None = None,
    ) -> None:
        self._app = app
        self._encoder = encoder
        self._media = media
        self._max_body_bytes = max_body_bytes
        self._client_embeds = client_embeds
        self._artifacts = artifacts
        self._place = place
        self._encode_timeout_s = encode_timeout_s
        self._ended = ended
        self._parsing = asyncio.Lock()
        self.budget = ByteBudget(max_pending_bytes)
        #: How wide the rows of the model behind are; another width is the encoder's fault. None: not checked.
        self.width: int | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI interface."""
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].endswith(_SUFFIX):
            await self._app(scope, receive, send)
            return
        connection = Connection(scope, receive)
        try:
            await self._chat(scope, connection, send)
        except ClientLeft:
            pass  # there is nobody to answer
        finally:
            connection.close()

    async def _chat(self, scope: Scope, connection: Connection, send: Send) -> None:
        try:
            with self.budget.holding() as held:
                scope, body = await self._with_embeds(scope, connection, held.reserve)
        except BodyTooLarge:
            message = f"the request is larger than max_body_bytes={self._max_body_bytes}"
            response = refusal(413, message, code="too_large")
        except _Faulty as faulty:
            response = error_response(faulty.error, param=faulty.param)
        except RetinueError as error:
            response = error_response(error)
        else:
            await self._app(scope, connection.replay(body), send)
            return
        await response(scope, connection.replay(b""), send)

    async def _with_embeds(
        self, scope: Scope, connection: Connection, reserve: Callable[[int], None]
    ) -> tuple[Scope, bytes]:
        """The request for the app behind."""
        body = await connection.body(self._max_body_bytes, reserve)
        request, write = await self._parsed(body)
        if self._place and _spells(self._place, request):
            raise InvalidInput(f"{self._place} is text that this server cannot take, in any field")
        parts = list(_image_parts(request, self._client_embeds))
        if not parts:
            return scope, body
        del body
        try:
            body = await connection.unless_left(
                self._in_time(self._encode(parts, reserve, partial(write, request)))
            )
        except BaseException as error:
            self._tell(len(parts), _ending(error))
            if isinstance(error, InvalidInput) and error.position is not None:
                raise _Faulty(error, f"{parts[error.position].param}.image_url") from error
            raise
        self._tell(len(parts), "ok")
        if self._artifacts:
            return {**scope, PARSED_REQUEST: request}, b""
        return {**scope, "headers": _with_length(scope["headers"], len(body))}, body

    async def _parsed(self, body: bytes) -> tuple[Any, Callable[[Any], bytes]]:
        if len(body) <= _SOON_PARSED_BYTES:
            return _parsed(body)
        async with self._parsing:
            return await asyncio.to_thread(_parsed, body)

    async def _in_time(self, work: Awaitable[T]) -> T:
        if self._encode_timeout_s is None:
            return await work
        with Interruption() as deadline:
            timer = asyncio.get_running_loop().call_later(self._encode_timeout_s, deadline.interrupt)
            try:
                return await work
            finally:
                timer.cancel()
        raise DeadlineExceeded(f"not encoded within encode_timeout_s={self._encode_timeout_s:g}")

    async def _encode(
        self, parts: Sequence[_ImagePart], reserve: Callable[[int], None], write: Callable[[], bytes]
    ) -> bytes:
        """Replace ``parts`` in their places; return what ``write`` makes of the request then, if need be."""
        images = await self._media.load([image.url for image in parts], reserve=reserve)
        embeds = Embeds.of(await self._encoder.encode(images))
        del images
        if self._artifacts:
            _replace(parts, embeds)
            return b""

        def written() -> bytes:
            _replace(parts, [of_one.text(self.width) for of_one in embeds])
            try:
                return write()
            except (TypeError, RecursionError):  # a parser reads deeper than a writer writes
                raise InvalidInput("the request is nested too deeply") from None

        return written() if soon_written(embeds) else await asyncio.to_thread(written)

    def _tell(self, images: int, ending: Ending) -> None:
        if self._ended is not None:
            self._ended(images, ending)


class _Faulty(Exception):
    """An error of one part of the request."""

    def __init__(self, error: RetinueError, param: str) -> None:
        super().__init__(str(error))
        self.error = error
        self.param = param


def _ending(error: BaseException) -> Ending:
    if isinstance(error, RetinueError):
        return error
    return "left" if isinstance(error, (ClientLeft, asyncio.CancelledError)) else "failed"


def _spells(text: str, value: Any) -> bool:
    """Whether ``text`` is in any string of ``value``, parsed JSON; what is nested too deep counts."""
    try:
        if isinstance(value, str):
            return text in value
        if isinstance(value, dict):
            return any(text in key or _spells(text, of_key) for key, of_key in value.items())
        return isinstance(value, list) and any(_spells(text, of_one) for of_one in value)
    except RecursionError:
        return True


def _parsed(body: bytes) -> tuple[Any, Callable[[Any], bytes]]:
    """The request, if it may have parts of ours, and how to write it; else None, for the app behind to judge.

    What Python's own parser reads, an app behind may read: NaN, UTF-16, half a surrogate pair. None of that
    may carry a part past us.
    """
    if not any(hint in body for hint in (b"image", b"embeds", b"\\u", b"\0")):
        return None, orjson.dumps
    try:
        return orjson.loads(body), orjson.dumps
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(body), lambda request: json.dumps(request).encode()
    except (ValueError, RecursionError):
        return None, orjson.dumps


def _image_parts(request: Any, client_embeds: bool) -> Iterator[_ImagePart]:
    """The parts to be encoded, in the order of the prompt. What is no chat request has none."""
    for i, message in enumerate(_list_in(request, "messages")):
        for j, part in enumerate(_list_in(message, "content")):
            kind = part.get("type") if isinstance(part, dict) else None
            param = f"messages[{i}].content[{j}]"
            if kind == "image_url":
                yield _ImagePart(part, param, _url(part, f"{param}.image_url"))
            elif kind == "prompt_embeds" and not client_embeds:
                message = (
                    "prompt_embeds parts are not taken from clients, unless the server says client_embeds"
                )
                raise _Faulty(InvalidInput(message), param)


def _list_in(value: Any, name: str) -> list[Any]:
    found = value.get(name) if isinstance(value, dict) else None
    return found if isinstance(found, list) else []


def _url(part: dict[str, Any], param: str) -> str:
    url = part.get("image_url")
    if isinstance(url, dict):
        url = url.get("url")
    if not isinstance(url, str):
        raise _Faulty(InvalidInput("an image_url part needs {'image_url': {'url': '...'}}"), param)
    return url


def _replace(parts: Sequence[_ImagePart], embeds: Sequence[Embeds | str]) -> None:
    for image, data in zip(parts, embeds, strict=True):
        image.part.clear()
        image.part.update(type="prompt_embeds", data=data)


def _with_length(headers: Sequence[tuple[bytes, bytes]], length: int) -> list[tuple[bytes, bytes]]:
    """``headers`` of a body of ``length`` that is sent as it is."""
    gone = (b"content-length", b"transfer-encoding", b"content-encoding")
    kept = [(name, value) for name, value in headers if name.lower() not in gone]
    return [*kept, (b"content-length", b"%d" % length)]
