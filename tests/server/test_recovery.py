"""A backend that fails as a whole, as clients, probes and supervisors see it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch

from retinue.batching import BatchRecord, LifeRecord, RequestRecord
from retinue.errors import BackendLost
from retinue.server.limits import FailurePolicy

from .asgi import SOON_S, Mirror, call
from .backends import Doomed, Gated, Tags, data_url
from .processes import started
from .serving import serving
from .test_command import SERVE
from .test_end_to_end import about
from .test_middleware import CHAT, chat, image
from .test_operations import built, figures, get

ROOT = Path(__file__).parents[2]


class Loses(Tags):
    """``Tags`` whose first forward is the last of its first life; the second build parks until let go."""

    def __init__(self) -> None:
        super().__init__()
        self.builds = 0
        self.building = threading.Event()
        self.may_build = threading.Event()

    def build(self, model_id: str) -> None:
        self.builds += 1
        if self.builds == 2:
            self.building.set()
            assert self.may_build.wait(SOON_S), "nobody let it build"

    def forward_batch(self, items: Sequence[int], target_bucket: int | None = None) -> list[torch.Tensor]:
        if self.builds == 1:
            raise BackendLost("the device is gone")
        return super().forward_batch(items)


class Watch:
    """An observer that hears that a call is late, or has ended; by then the server's own have heard of it."""

    def __init__(self) -> None:
        self.is_stuck = threading.Event()
        self.is_back = threading.Event()

    def on_batch(self, record: BatchRecord) -> None:
        pass

    def on_request(self, record: RequestRecord) -> None:
        pass

    def on_life(self, record: LifeRecord) -> None:
        if record.event == "stuck":
            self.is_stuck.set()
        elif record.event == "back":
            self.is_back.set()


async def test_a_lost_backend_is_not_ready_until_it_is_built_again_and_no_request_is_lost() -> None:
    backend = Loses()
    async with built(backend) as stack:
        asked = asyncio.create_task(call(stack.app, CHAT, chat([image(3)])))
        assert await asyncio.to_thread(backend.building.wait, SOON_S)
        reply = await get(stack, "/ready")
        assert reply.status == 503
        assert reply.json()["reason"] == "the backend was lost and is being built again"
        backend.may_build.set()
        assert (await asked).status == 200
        assert (await get(stack, "/ready")).status == 200
        shown = figures(await get(stack, "/metrics"))
    assert shown['retinue_batches_total{outcome="lost"}'] == 1
    assert shown["retinue_retries_total"] == 1
    assert shown['retinue_backend_events_total{event="rebuilt"}'] == 1


async def test_when_rebuilds_are_spent_requests_get_503_and_readiness_says_why() -> None:
    async with built(Doomed(), failures=FailurePolicy(max_rebuilds=1)) as stack:
        first = await call(stack.app, CHAT, chat([image(3)]))
        assert first.status == 500  # in flight at both losses
        later = await call(stack.app, CHAT, chat([image(4)]))
        assert later.status == 503
        assert "the device is gone" not in first.body.decode() + later.body.decode()
        reply = await get(stack, "/ready")
        assert reply.status == 503
        assert reply.json() == reply.json() | {
            "phase": "failed",
            "reason": "the backend has failed and is not built again",
        }
        assert (await get(stack, "/health")).status == 200


async def test_a_forward_beyond_its_time_is_504_others_503_and_it_comes_back() -> None:
    backend = Gated()
    watch = Watch()
    async with built(backend, failures=FailurePolicy(forward_timeout_s=0.05), observer=watch) as stack:
        late = await call(stack.app, CHAT, chat([image(3)]))
        assert late.status == 504
        assert (await call(stack.app, CHAT, chat([image(4)]))).status == 503
        assert await asyncio.to_thread(watch.is_stuck.wait, SOON_S)
        reply = await get(stack, "/ready")
        assert reply.status == 503
        assert reply.json()["reason"] == "a call has been running for more than forward_timeout_s=0.05"
        backend.open()
        assert await asyncio.to_thread(watch.is_back.wait, SOON_S)
        assert (await get(stack, "/ready")).status == 200
        assert (await call(stack.app, CHAT, chat([image(5)]))).status == 200


async def test_out_of_memory_shows_in_the_metrics_and_costs_no_request() -> None:
    class Small(Tags):
        released = 0

        def forward_batch(self, items: Sequence[int], target_bucket: int | None = None) -> Any:
            if len(items) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward_batch(items)

        def release_memory(self) -> None:
            self.released += 1

    backend = Small()
    async with built(backend) as stack:
        reply = await call(stack.app, CHAT, chat([image(tag) for tag in range(5)]))
        assert reply.status == 200
        shown = figures(await get(stack, "/metrics"))
    assert shown['retinue_batches_total{outcome="out_of_memory"}'] == 1
    assert shown["retinue_cost_ceiling"] == 2
    assert backend.released == 1


async def test_a_request_whose_image_makes_the_batch_fail_fails_alone() -> None:
    class Poisoned(Gated):
        def forward_batch(self, items: Sequence[int], target_bucket: int | None = None) -> Any:
            artifacts = super().forward_batch(items)
            if 66 in items:
                raise RuntimeError("poison")
            return artifacts

    backend = Poisoned()
    async with built(backend) as stack:
        first = asyncio.create_task(call(stack.app, CHAT, chat([image(1)])))
        await backend.inside()
        asked = [asyncio.create_task(call(stack.app, CHAT, chat([image(tag)]))) for tag in (2, 66, 3)]
        while stack.encoder.pending().items < 3:  # noqa: ASYNC110  # nothing tells when an item begins to wait
            await asyncio.sleep(0.001)
        backend.open()
        assert (await first).status == 200
        assert [reply.status for reply in await asyncio.gather(*asked)] == [200, 500, 200]


@pytest.mark.timeout(120)
async def test_under_exit_on_failure_the_process_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    encoder = ("--encoder", "tests.server.backends:Doomed", "--max-rebuilds", "0", "--exit-on-failure")
    with serving(Mirror()) as upstream:
        async with started("retinue", *SERVE, "--upstream", upstream.url, *encoder) as server:
            await server.ready()
            body = {"model": "any", "messages": about(data_url(1))}
            assert b" 503 " in (await server.ask("/v1/chat/completions", orjson.dumps(body)))[:20]
            assert await server.end() == 1
