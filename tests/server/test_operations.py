"""Health, readiness and metrics: what an operator is told is what is so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from retinue.batching import BatchRecord
from retinue.encoder import AsyncVisionEncoder
from retinue.errors import InvalidInput
from retinue.media import Image, MediaPolicy
from retinue.server.limits import ServerLimits
from retinue.server.readiness import Phase, Readiness
from retinue.server.stack import Behind, Stack

from .asgi import Client, Mirror, Reply, call
from .backends import Gated, Tags, png
from .test_middleware import CHAT, chat, image


@asynccontextmanager
async def built(backend: Tags | None = None, **options: Any) -> AsyncIterator[Stack]:
    """A stack in front of a mirror."""
    stack = Stack(backend or Tags(), "none", Behind(Mirror()), **options)
    await stack.build()
    try:
        yield stack
    finally:
        await stack.close()


async def get(stack: Stack, path: str) -> Reply:
    return await call(stack.app, path, method="GET")


def figures(reply: Reply) -> dict[str, float]:
    """The samples of a reply of /metrics."""
    lines = [line for line in reply.body.decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


# -- health and readiness ------------------------------------------------------------------------------


async def test_a_server_is_healthy_from_the_beginning_and_ready_once_built() -> None:
    stack = Stack(Tags(), "none", Behind(Mirror()))
    assert (await get(stack, "/health")).status == 200
    building = await get(stack, "/ready")
    assert building.status == 503
    assert building.json()["phase"] == "building"
    assert (await call(stack.app, CHAT, chat([image(1)]))).status == 503
    await stack.build()
    ready = await get(stack, "/ready")
    assert ready.status == 200
    assert ready.json()["reason"] == ""
    stack.drain()
    draining = await get(stack, "/ready")
    assert (draining.status, draining.json()["phase"]) == (503, "draining")
    await stack.close()
    assert (await get(stack, "/health")).status == 200


async def test_what_could_not_be_built_says_so() -> None:
    class Broken(Tags):
        def build(self, model_id: str) -> None:
            raise OSError("no weights")

    stack = Stack(Broken(), "none", Behind(Mirror()))
    with pytest.raises(OSError, match="no weights"):
        await stack.build()
    reply = await get(stack, "/ready")
    assert (reply.status, reply.json()["phase"]) == (503, "failed")
    assert "OSError" in reply.json()["reason"]
    await stack.close()
    assert (await get(stack, "/ready")).json()["phase"] == "failed"


async def test_an_idle_server_proves_itself_by_a_real_forward() -> None:
    backend = Tags()
    async with built(backend) as stack:
        assert (await get(stack, "/ready")).status == 200
        assert len(backend.calls) == 1
        assert (await get(stack, "/ready")).json()["last_forward_s_ago"] < 10
        assert len(backend.calls) == 1  # that was lately enough


async def test_a_batch_of_clients_proves_it_too() -> None:
    async with built() as stack:
        await call(stack.app, CHAT, chat([image(1)]))
    report = await stack.readiness.report()  # closed, so the record of the batch has come
    assert report.last_forward_s_ago is not None


async def test_a_backend_that_fails_is_not_ready() -> None:
    backend = Tags()
    async with built(backend) as stack:
        backend.fault = RuntimeError("/etc/secret")
        reply = await get(stack, "/ready")
        assert reply.status == 503
        assert reply.json()["reason"] == "a forward failed: EncoderFailed"
        backend.fault = None
        assert (await get(stack, "/ready")).status == 200


async def test_a_backend_that_refuses_the_probe_lives() -> None:
    class Choosy(Tags):
        def preprocess(self, raw: Any) -> Any:
            raise InvalidInput("only X-rays")

    async with built(Choosy()) as stack:
        assert (await get(stack, "/ready")).status == 200


async def test_a_stuck_forward_is_not_ready_and_shows_its_age() -> None:
    backend = Gated()
    encoder: AsyncVisionEncoder[Any, Any, Any] = AsyncVisionEncoder(backend, "none")
    async with encoder:
        readiness = Readiness(encoder, probe_timeout_s=0.01)
        readiness.phase = Phase.SERVING
        stuck = asyncio.create_task(encoder.encode([Image(png(1))]))
        await backend.inside()
        report = await readiness.report()
        assert not report.ready
        assert "no forward succeeded within 0.01 s; a call has been running for" in report.reason
        backend.open()
        await stuck


async def test_a_success_of_long_ago_proves_nothing() -> None:
    now_s = 100.0
    backend = Tags()
    encoder: AsyncVisionEncoder[Any, Any, Any] = AsyncVisionEncoder(backend, "none")
    async with encoder:
        readiness = Readiness(encoder, clock=lambda: now_s)
        readiness.phase = Phase.SERVING
        readiness.on_batch(BatchRecord(1, 1, 1, 1, None, None, 0.0, 0.0, "ok"))
        assert (await readiness.report()).last_forward_s_ago == 0
        assert backend.calls == []
        now_s = 200.0
        assert (await readiness.report()).ready
        assert len(backend.calls) == 1


async def test_who_asks_at_once_shares_one_probe() -> None:
    backend = Gated()
    async with built(backend) as stack:
        asking = [asyncio.create_task(get(stack, "/ready")) for _ in range(5)]
        await backend.inside()
        backend.open()
        assert {(await task).status for task in asking} == {200}
        assert len(backend.calls) == 1


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
async def test_operators_need_no_key_and_only_ask(path: str) -> None:
    async with built(api_key="sesame") as stack:
        assert (await get(stack, path)).status == 200
        assert (await call(stack.app, path)).status == 405
        assert (await get(stack, "/v1/models")).status == 401


# -- metrics -------------------------------------------------------------------------------------------


async def test_requests_images_and_batches_are_counted() -> None:
    async with built() as stack:
        await call(stack.app, CHAT, chat([image(1), image(2), image(3)]))
        await call(stack.app, CHAT, chat([{"type": "image_url", "image_url": {"url": "data:,no"}}]))
        await call(stack.app, CHAT, chat("words alone"))
    shown = figures(await get(stack, "/metrics"))  # closed, so the record of the batch has come
    assert shown['retinue_requests_total{outcome="ok"}'] == 1
    assert shown['retinue_images_total{outcome="ok"}'] == 3
    assert shown['retinue_requests_total{outcome="invalid_input"}'] == 1
    assert shown['retinue_batches_total{outcome="ok"}'] == 1
    assert shown['retinue_batches_total{outcome="failed"}'] == 0
    assert shown["retinue_batch_items_sum"] == 3
    assert shown["retinue_batch_cost_sum"] == 3
    assert shown["retinue_batch_fill_ratio_sum"] == 3 / 8
    assert shown["retinue_preprocess_seconds_count"] == 3
    assert shown["retinue_forward_seconds_count"] == 1
    assert shown["retinue_wait_seconds_count"] == 1


async def test_gauges_show_what_is_and_come_back_to_zero() -> None:
    backend = Gated()
    async with built(backend) as stack:
        running = asyncio.create_task(call(stack.app, CHAT, chat([image(1)])))
        await backend.inside()
        shown = figures(await get(stack, "/metrics"))
        assert shown["retinue_requests_in_flight"] == 1
        assert shown["retinue_running_cost"] == 1
        assert shown["retinue_pending_bytes"] > 0
        backend.open()
        await running
        shown = figures(await get(stack, "/metrics"))
    for name in ("requests_in_flight", "running_cost", "pending_bytes", "pending_items", "pending_cost"):
        assert shown[f"retinue_{name}"] == 0


async def test_cancellations_are_told_apart_by_the_claim() -> None:
    backend = Gated()
    async with built(backend) as stack:
        clients = [Client(CHAT, chat([image(tag)])) for tag in (1, 2)]
        claimed = asyncio.create_task(clients[0].call(stack.app))
        await backend.inside()
        unclaimed = asyncio.create_task(clients[1].call(stack.app))
        while not stack.encoder.pending().items:  # noqa: ASYNC110  # nothing tells when an item begins to wait
            await asyncio.sleep(0)
        for client in clients:
            client.leave()
        await asyncio.gather(claimed, unclaimed)
        backend.open()
        shown = figures(await get(stack, "/metrics"))
    assert shown['retinue_cancellations_total{claimed="yes"}'] == 1
    assert shown['retinue_cancellations_total{claimed="no"}'] == 1
    assert shown['retinue_requests_total{outcome="left"}'] == 2


async def test_overload_of_the_encoder_is_429_with_retry_after() -> None:
    backend = Gated()
    async with built(backend, limits=ServerLimits(max_pending_cost=1)) as stack:
        running = asyncio.create_task(call(stack.app, CHAT, chat([image(1)])))
        await backend.inside()
        reply = await call(stack.app, CHAT, chat([image(2)]))
        assert reply.status == 429
        assert int(reply.headers["retry-after"]) >= 1
        backend.open()
        await running
        assert (await call(stack.app, CHAT, chat([image(2)]))).status == 200
        shown = figures(await get(stack, "/metrics"))
    assert shown['retinue_requests_total{outcome="overloaded"}'] == 1


async def test_an_observer_of_the_owner_s_hears_too() -> None:
    batches = []

    class Ear:
        def on_batch(self, record: BatchRecord) -> None:
            batches.append(record.items)

        def on_request(self, record: object) -> None:
            pass

    async with built(observer=Ear(), media=MediaPolicy(max_images=3)) as stack:
        await call(stack.app, CHAT, chat([image(1), image(2)]))
    assert batches == [2]


@pytest.mark.parametrize(
    "options",
    [
        {"max_concurrent_requests": 0},
        {"max_pending_bytes": 0},
        {"max_body_bytes": -1},
        {"request_timeout_s": float("nan")},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_limit_of_nothing_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        ServerLimits(**options)
