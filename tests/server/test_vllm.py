"""The middleware for vLLM's server, in front of an app that has its state; tests/vllm has the real server."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import prometheus_client
import pytest
import torch
from starlette.types import Message, Receive, Scope, Send

from retinue.batching.recording import read_trace
from retinue.demo.run import PICTURES
from retinue.media import MediaPolicy
from retinue.server.limits import EncodeLimits
from retinue.vllm import Config, EncodeImages

from .asgi import SOON_S, Client, Reply

ENCODER = "retinue.demo.encoder:DigitsEncoder"
CHAT = "/v1/chat/completions"


# -- the environment -----------------------------------------------------------------------------------


def test_a_configuration_survives_its_way_through_the_environment(tmp_path: Path) -> None:
    config = Config(
        encoder=ENCODER,
        encoder_model="a model",
        encode_timeout_s=2.5,
        record_trace=tmp_path / "trace.jsonl",
        limits=EncodeLimits(max_pending_cost=7, client_embeds=True),
        media=MediaPolicy(max_images=3, allowed_domains=("a.example", "b.example"), file_root=tmp_path),
    )
    assert Config.from_environment(config.to_environment() | {"HOME": "/", "RETINUE_API_KEY": "x"}) == config


def test_what_has_its_default_is_in_no_variable() -> None:
    assert Config(encoder=ENCODER).to_environment() == {"RETINUE_ENCODER": ENCODER}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "RETINUE_ENCODER is not set"),
        ({"RETINUE_ENCODR": "x"}, "unknown variables in the environment: RETINUE_ENCODR"),
        ({"RETINUE_ENCODER": ENCODER, "RETINUE_LIMITS": "1"}, "unknown .* RETINUE_LIMITS"),
        ({"RETINUE_ENCODER": ENCODER, "RETINUE_MAX_IMAGES": "many"}, "RETINUE_MAX_IMAGES: .* integer"),
        ({"RETINUE_ENCODER": ENCODER, "RETINUE_CLIENT_EMBEDS": "perhaps"}, "RETINUE_CLIENT_EMBEDS: .* bool"),
        ({"RETINUE_ENCODER": ENCODER, "RETINUE_MAX_IMAGES": "0"}, "max_images must be 1 or more, got 0"),
    ],
)
def test_a_variable_that_cannot_be_is_named(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config.from_environment(variables)


# -- the middleware ------------------------------------------------------------------------------------


class Vllm:
    """Has what the middleware looks at of vLLM's app, and answers requests with what it got."""

    def __init__(self, *, width: int = 128, takes_embeds: bool = True, key: str | None = None) -> None:
        model = SimpleNamespace(enable_prompt_embeds=takes_embeds, get_inputs_embeds_size=lambda: width)
        self.dead = False
        self.state = SimpleNamespace(
            vllm_config=SimpleNamespace(model_config=model),
            args=SimpleNamespace(api_key=[key] if key else None),
            engine_client=SimpleNamespace(check_health=self._check_health),
        )
        self.bodies: list[Any] = []

    async def _check_health(self) -> None:
        if self.dead:
            raise RuntimeError("the engine is dead")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for phase in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{phase}.complete"})
            return
        self.bodies.append(orjson.loads((await receive())["body"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


class Running:
    """The middleware in front of ``vllm``, with its lifespan."""

    def __init__(self, vllm: Vllm) -> None:
        self.vllm = vllm
        self.app = EncodeImages(vllm)
        self._to_app: asyncio.Queue[Message] = asyncio.Queue()
        self._answers: asyncio.Queue[Message] = asyncio.Queue()
        scope = {"type": "lifespan", "app": vllm}
        self._living = asyncio.create_task(self.app(scope, self._to_app.get, self._answers.put))

    async def say(self, what: str) -> Message:
        self._to_app.put_nowait({"type": f"lifespan.{what}"})
        return await asyncio.wait_for(self._answers.get(), SOON_S)

    def end(self) -> None:
        self._living.cancel()

    async def ask(self, content: list[Any], headers: dict[str, str] | None = None, **fields: Any) -> Reply:
        body = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": content}], **fields})
        client = Client(CHAT, body, headers=headers)
        client.scope["app"] = self.vllm
        return await client.call(self.app)

    async def ready(self) -> Reply:
        client = Client("/ready", method="GET")
        client.scope["app"] = self.vllm
        return await client.call(self.app)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> prometheus_client.CollectorRegistry:
    """In place of the process's one, where vLLM's figures are."""
    registry = prometheus_client.CollectorRegistry()
    monkeypatch.setattr(prometheus_client, "REGISTRY", registry)
    return registry


@pytest.fixture(autouse=True)
def configured(monkeypatch: pytest.MonkeyPatch, registry: prometheus_client.CollectorRegistry) -> None:
    monkeypatch.setenv("RETINUE_ENCODER", ENCODER)
    monkeypatch.setenv("RETINUE_ENCODER_MODEL", "demo")
    monkeypatch.setenv("RETINUE_MAX_IMAGES", "2")
    monkeypatch.syspath_prepend(".")  # so that what the middleware adds to the path goes again


@contextlib.asynccontextmanager
async def running(vllm: Vllm) -> AsyncIterator[Running]:
    server = Running(vllm)
    assert await server.say("startup") == {"type": "lifespan.startup.complete"}
    yield server
    assert await server.say("shutdown") == {"type": "lifespan.shutdown.complete"}


def image() -> dict[str, Any]:
    data = next(path for path in sorted(PICTURES.iterdir()) if path.suffix == ".png").read_bytes()
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


TEXT = {"type": "text", "text": "What number do the images spell?"}


async def test_images_become_embeddings_of_the_models_width() -> None:
    async with running(Vllm()) as server:
        assert (await server.ask([image(), TEXT])).status == 200
    part, text = server.vllm.bodies[0]["messages"][0]["content"]
    assert text == TEXT
    assert part["type"] == "prompt_embeds"
    assert torch.load(io.BytesIO(base64.b64decode(part["data"]))).shape[1] == 128


async def test_limits_come_from_the_environment() -> None:
    async with running(Vllm()) as server:
        refused = await server.ask([image()] * 3)
    assert refused.status == 400
    assert "more than max_images=2" in refused.json()["error"]["message"]


async def test_an_encoder_of_another_width_keeps_the_server_from_listening() -> None:
    server = Running(Vllm(width=64))
    failed = await server.say("startup")
    assert failed["type"] == "lifespan.startup.failed"
    assert "does not fit the model" in failed["message"]
    assert "(rows, 64)" in failed["message"]
    server.end()


async def test_a_server_without_embeddings_is_told_the_flag() -> None:
    server = Running(Vllm(takes_embeds=False))
    assert "--enable-prompt-embeds" in (await server.say("startup"))["message"]
    server.end()


async def test_without_vllms_key_nothing_is_encoded_and_vllm_refuses() -> None:
    async with running(Vllm(key="secret")) as server:
        await server.ask([image(), TEXT])
        await server.ask([image(), TEXT], {"Authorization": "Bearer wrong"})
        await server.ask([image(), TEXT], {"Authorization": "Bearer secret"})
    kinds = [body["messages"][0]["content"][0]["type"] for body in server.vllm.bodies]
    assert kinds == ["image_url", "image_url", "prompt_embeds"]


async def test_the_key_may_be_in_vllms_own_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    async with running(Vllm()) as server:
        await server.ask([image()])
    assert server.vllm.bodies[0]["messages"][0]["content"][0]["type"] == "image_url"


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "f", "description": "a <prompt_embeds> b"}}]},
        {"chat_template_kwargs": {"<prompt_embeds>": 1}},
        {"documents": [{"text": "<prompt_embeds>"}]},
        {"tools": [{"type": "image_url", "function": {"description": "<prompt_embeds>"}}]},
    ],
)
async def test_text_that_vllm_takes_for_an_image_is_refused_in_any_field(fields: dict[str, Any]) -> None:
    async with running(Vllm()) as server:
        refused = await server.ask([image(), TEXT], **fields)
        assert refused.status == 400
        assert "<prompt_embeds>" in refused.json()["error"]["message"]
        assert (await server.ask([{"type": "text", "text": "<prompt_embeds>"}])).status == 400
        assert (await server.ask([image(), TEXT])).status == 200
    assert len(server.vllm.bodies) == 1


async def test_a_request_nested_too_deep_to_be_looked_through_is_a_400() -> None:
    body = b'{"messages": [], "embeds": ' + b"[" * 900 + b"]" * 900 + b"}"
    async with running(Vllm()) as server:
        client = Client(CHAT, body)
        client.scope["app"] = server.vllm
        assert (await client.call(server.app)).status == 400


async def test_ready_is_both_the_encoder_and_the_engine() -> None:
    async with running(Vllm()) as server:
        assert (await server.ready()).status == 200
        server.vllm.dead = True
        reply = await server.ready()
        assert reply.status == 503
        assert "engine" in reply.json()["reason"]
        server.vllm.dead = False
        assert (await server.ready()).status == 200
    assert (await server.ready()).status == 503


async def test_its_figures_are_among_vllms(registry: prometheus_client.CollectorRegistry) -> None:
    async with running(Vllm()) as server:
        await server.ask([image()])
    assert registry.get_sample_value("retinue_images_total", {"outcome": "ok"}) == 1


async def test_what_is_encoded_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.jsonl"
    monkeypatch.setenv("RETINUE_RECORD_TRACE", str(path))
    async with running(Vllm()) as server:
        await server.ask([image()])
    trace = read_trace(path)
    assert [request.items for request in trace.requests] == [1, 1]  # the first is the encoder's trial
