"""The embedded decoder behind OpenAI's API, for where no other server does the language.

What would block the event loop (JSON, base64, tensors, tokens) runs in asyncio's own threads. Such a job is
bounded by ``max_body_bytes`` and ends by itself, so it cannot hold up an exit; one whose client leaves
before it has begun never runs. An executor of ours would do no more, and need somebody who ends it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from retinue.decoders.transformers import GenerationOptions, TransformersDecoder
from retinue.errors import InvalidInput
from retinue.prompt.tensors import Prompt
from retinue.server.chat import Answer, BadParameter, parse_chat, part_name
from retinue.server.connection import BodyTooLarge, ClientLeft, Connection
from retinue.server.embeds import PARSED_REQUEST, Embeds, rows_of_text
from retinue.server.errors import error_body, error_response, refusal

__all__ = ["EmbeddedApp"]

_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # or nginx collects the pieces
]


class EmbeddedApp:
    """An ASGI app that answers chat requests with a decoder of this process.

    Images come as ``prompt_embeds`` parts, which an encoder in front has made: in the body, or in a request
    that ``EncodeImages(..., artifacts=True)`` has parsed. The decoder's life is its owner's.

    ``model_name``: what clients must call the model. ``max_body_bytes``: of a request with its embeddings;
    what clients send is for the middleware to bound. A request that leaves ``temperature`` out gets the
    likeliest text, not a drawn one; one that leaves ``max_tokens`` out, at most 256 tokens.
    """

    def __init__(self, decoder: TransformersDecoder, *, model_name: str, max_body_bytes: int = 2**30) -> None:
        self._model = {
            "id": model_name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "retinue",
        }
        completions = _Completions(decoder, model_name, max_body_bytes)
        self._app = Starlette(
            routes=[
                Route("/v1/chat/completions", completions, methods=["POST"]),
                Route("/v1/models", self._list_models),
                Route("/v1/models/{name:path}", self._show_model),
            ],
            exception_handlers={HTTPException: _no_such_route},
        )
        self._app.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection, as ASGI says."""
        await self._app(scope, receive, send)

    async def _list_models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._model]})

    async def _show_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        return _json(self._model) if name == self._model["id"] else _no_such_model(name)


class _UnknownModel(Exception):
    """The request is for a model that is not ours; its argument is the name."""


@dataclass(frozen=True, eq=False)
class _Work:
    """What is left of a request once it has been read: neither its body nor its messages."""

    prompt: Prompt
    options: GenerationOptions
    stream: bool
    answer: Answer


class _Completions:
    """The endpoint that answers chats. A client that leaves, at any moment, stops its text."""

    def __init__(self, decoder: TransformersDecoder, model_name: str, max_body_bytes: int) -> None:
        self._decoder = decoder
        self._model_name = model_name
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = Connection(scope, receive)
        try:
            try:
                work = await self._receive(scope, connection)
            except ClientLeft:
                raise
            except Exception as error:
                await self._refusal(error)(scope, receive, send)
            else:
                await connection.unless_left(self._respond(work, scope, receive, send))
        except ClientLeft:
            pass  # whatever was done for it has stopped
        finally:
            connection.close()

    async def _receive(self, scope: Scope, connection: Connection) -> _Work:
        if PARSED_REQUEST in scope:
            read = asyncio.to_thread(self._read, scope[PARSED_REQUEST])
        else:
            read = asyncio.to_thread(self._parse, await connection.body(self._max_body_bytes))
        return await connection.unless_left(read)

    def _parse(self, body: bytes) -> _Work:
        try:
            return self._read(orjson.loads(body))
        except orjson.JSONDecodeError as error:
            raise BadParameter(f"the body is not JSON: {error}") from None

    def _read(self, request: object) -> _Work:
        chat = parse_chat(request)
        if chat.model != self._model_name:
            raise _UnknownModel(chat.model)
        prompt = self._decoder.chat_prompt(_with_tensors(chat.messages, self._decoder.width))
        return _Work(
            prompt,
            chat.options_within(self._decoder.context, len(prompt.token_ids)),
            chat.stream,
            Answer(
                id=f"chatcmpl-{secrets.token_hex(16)}",
                created=int(time.time()),
                model=self._model_name,
                include_usage=chat.include_usage,
            ),
        )

    async def _respond(self, work: _Work, scope: Scope, receive: Receive, send: Send) -> None:
        response: ASGIApp
        try:
            response = await self._answer(work)
        except Exception as error:
            response = self._refusal(error)
        await response(scope, receive, send)

    async def _answer(self, work: _Work) -> ASGIApp:
        """The response, once it is known that there is one: a failure until then has its own status."""
        if not work.stream:
            return _json(work.answer.completion(await self._decoder.generate(work.prompt, work.options)))
        events = self._events(work)
        return _EventStream(await anext(events), events)

    async def _events(self, work: _Work) -> AsyncGenerator[bytes, None]:
        """The events of a stream; the first when there is text, or the generation has ended without any."""
        async with self._decoder.stream(work.prompt, work.options) as stream:
            piece = await anext(stream, None)
            yield _event(work.answer.opening())
            try:
                while piece is not None:
                    yield _event(work.answer.piece(piece))
                    piece = await anext(stream, None)
            except Exception as error:  # too late for a status
                yield _event(error_body(error))
                return
            for chunk in work.answer.ending(stream.generation):
                yield _event(chunk)
            yield b"data: [DONE]\n\n"

    def _refusal(self, error: Exception) -> Response:
        if isinstance(error, BodyTooLarge):
            message = f"the body is larger than max_body_bytes={self._max_body_bytes}"
            return refusal(413, message, code="body_too_large")
        if isinstance(error, _UnknownModel):
            return _no_such_model(*error.args)
        if isinstance(error, BadParameter):
            return error_response(error, param=error.param)
        return error_response(error, param="messages" if isinstance(error, InvalidInput) else None)


class _EventStream:
    """A response of server-sent events, of which the first is already there."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest) as rest:
            await send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for event in rest:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def _json(data: Mapping[str, Any]) -> Response:
    return Response(orjson.dumps(data), media_type="application/json")


def _no_such_model(name: str) -> Response:
    return refusal(404, f"there is no model {name!r} here", code="model_not_found", param="model")


async def _no_such_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"
    if error.status_code == 405:
        response = refusal(405, f"{what}: no such method here", code="method_not_allowed")
    else:
        response = refusal(error.status_code, f"{what}: no such path here", code="not_found")
    response.headers.update(error.headers or {})
    return response


def _with_tensors(messages: Sequence[Mapping[str, Any]], width: int) -> list[dict[str, Any]]:
    """``messages`` with a tensor for the data of each ``prompt_embeds`` part."""

    def opened(part: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        if part["type"] != "prompt_embeds":
            return part
        data = part["data"]
        if isinstance(data, Embeds):
            return {**part, "data": data.rows(width)}
        try:
            return {**part, "data": rows_of_text(data, width)}
        except InvalidInput as error:
            raise BadParameter(f"{name}: {error}", param=name) from None

    return [
        {
            **message,
            "content": [opened(part, part_name(n, m)) for m, part in enumerate(message["content"])],
        }
        if isinstance(message.get("content"), list)
        else dict(message)
        for n, message in enumerate(messages)
    ]
