"""The artifact cache in a server: on by default, sized by the memory at hand, and shown in the metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
import torch

from retinue.encoder import Preprocessed
from retinue.media import Image
from retinue.server.limits import EncodeLimits, ServerLimits, memory_at_hand
from retinue.server.serving import listening
from retinue.server.stack import Behind, Stack
from retinue.vllm import Config

from .asgi import Mirror, Reply, call
from .backends import Tags, png, rows_of
from .test_middleware import CHAT, chat, contents_of, embeds, image
from .test_operations import built, figures, get


class Counting(Tags):
    """``Tags`` that keeps which pictures were preprocessed."""

    def __init__(self) -> None:
        super().__init__()
        self.preprocessed: list[int] = []

    def preprocess(self, raw: Image) -> Preprocessed[int]:
        prepared = super().preprocess(raw)
        self.preprocessed.append(prepared.item)
        return prepared

    def take(self) -> tuple[list[int], list[int]]:
        """What was preprocessed and what was encoded since the last time."""
        taken = sorted(self.preprocessed), sorted(tag for call in self.calls for tag in call)
        self.preprocessed.clear()
        self.calls.clear()
        return taken


async def ask(url: str, body: bytes) -> Reply:
    """The answer over HTTP."""
    async with aiohttp.ClientSession() as session, session.post(url + CHAT, data=body) as answer:
        return Reply(answer.status, dict(answer.headers), await answer.read())


def shown(reply: Reply) -> list[torch.Tensor]:
    """What the app behind got in the places of images."""
    parts = [part for content in contents_of(reply) if isinstance(content, list) for part in content]
    return [embeds(part) for part in parts]


async def test_a_turn_of_a_conversation_encodes_its_new_images_alone() -> None:
    """Over HTTP, as clients do it: each turn sends all the messages before it again, images and all."""
    backend = Counting()
    messages: list[dict[str, Any]] = []
    sent: list[int] = []
    async with listening(Stack(backend, "none", Behind(Mirror()))) as url:
        for new, again in (([1], []), ([2, 3], []), ([], []), ([4], [2]), ([], [1])):
            content = [image(tag) for tag in new + again]
            messages.append({"role": "user", "content": content or "and now?"})
            reply = await ask(url, orjson.dumps({"model": "m", "messages": messages}))
            sent += new + again
            assert all(map(torch.equal, shown(reply), map(rows_of, sent)))
            assert len(shown(reply)) == len(sent)
            assert backend.take() == (new, new)
            messages.append({"role": "assistant", "content": "I see."})


async def test_the_option_turns_it_off() -> None:
    backend = Counting()
    async with built(backend, limits=ServerLimits(artifact_cache_bytes=0)) as stack:
        for _ in range(2):
            await call(stack.app, CHAT, chat([image(1), image(2), image(1)]))
            assert backend.take() == ([1, 1, 2], [1, 1, 2])
        shown = figures(await get(stack, "/metrics"))
    assert shown["retinue_cache_entries"] == 0
    assert shown['retinue_cache_lookups_total{outcome="miss"}'] == 0


async def test_metrics_show_what_the_cache_does() -> None:
    bytes_of_3 = rows_of(3).nbytes
    async with built(limits=ServerLimits(artifact_cache_bytes=bytes_of_3)) as stack:
        for tags in ([3], [3, 3], [3, 1], [1]):  # 1 takes the place of 3
            assert (await call(stack.app, CHAT, chat([image(tag) for tag in tags]))).status == 200
        assert (await call(stack.app, CHAT, chat([image(2), image(2)]))).status == 200
        shown = figures(await get(stack, "/metrics"))
    assert shown['retinue_cache_lookups_total{outcome="hit"}'] == 4
    assert shown['retinue_cache_lookups_total{outcome="joined"}'] == 1
    assert shown['retinue_cache_lookups_total{outcome="miss"}'] == 3
    assert shown["retinue_cache_evictions_total"] == 2
    assert shown["retinue_cache_entries"] == 1
    assert shown["retinue_cache_bytes"] == rows_of(2).nbytes


async def test_readiness_is_a_real_forward_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retinue.server.readiness._FRESH_S", 0.0)
    backend = Tags()
    async with built(backend) as stack:
        for _ in range(3):
            assert (await get(stack, "/ready")).status == 200
        assert len(backend.calls) == 3
        backend.fault = RuntimeError("the device is gone")
        assert (await get(stack, "/ready")).status == 503
        assert stack.encoder.cached().entries == 0


async def test_a_failure_is_not_remembered() -> None:
    backend = Tags()
    async with built(backend) as stack:
        backend.fault = RuntimeError("no")
        assert (await call(stack.app, CHAT, chat([image(1)]))).status == 500
        backend.fault = None
        assert (await call(stack.app, CHAT, chat([image(1)]))).status == 200
        backend.fault = RuntimeError("no")
        assert (await call(stack.app, CHAT, chat([image(1)]))).status == 200  # known by now


def test_pictures_are_the_same_by_their_bytes() -> None:
    assert Image(png(1)).content_key == Image(png(1), url="https://example.com/1.png").content_key
    assert Image(png(1)).content_key != Image(png(2)).content_key
    assert Image(png(1)).content_key != Image(png(1) + b"\0").content_key


# -- how much ------------------------------------------------------------------------------------------


def test_a_sixteenth_of_the_memory_at_hand_is_for_artifacts(monkeypatch: pytest.MonkeyPatch) -> None:
    for memory, budget in ((2**30, 2**26), (2**36, 2**32), (2**40, 2**32)):
        monkeypatch.setattr("retinue.server.limits.memory_at_hand", lambda memory=memory: memory)
        assert EncodeLimits().cache_bytes() == budget
        assert EncodeLimits(artifact_cache_bytes=5).cache_bytes() == 5
        assert EncodeLimits(artifact_cache_bytes=0).cache_bytes() == 0


@pytest.mark.parametrize("value", [-1, 1.5, True])
def test_a_budget_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="artifact_cache_bytes must be an int >= 0"):
        EncodeLimits(artifact_cache_bytes=value)


def test_vllm_s_middleware_takes_it_from_the_environment() -> None:
    environment = {"RETINUE_ENCODER": "a:B", "RETINUE_ARTIFACT_CACHE_BYTES": "0"}
    config = Config.from_environment(environment)
    assert config.limits.artifact_cache_bytes == 0
    assert config.to_environment() == environment
    assert Config(encoder="a:B").to_environment() == {"RETINUE_ENCODER": "a:B"}


GROUPS: dict[str, tuple[str, dict[str, str]]] = {
    "version 2": ("0::/app\n", {"app/memory.max": "max", "memory.max": "4096"}),
    "version 2, of a parent": ("0::/a/b\n", {"a/b/memory.max": "8192", "a/memory.max": "4096"}),
    "version 2, in a container": ("0::/\n", {"memory.max": "4096"}),
    "version 1": (
        "5:cpu:/app\n4:memory,hugetlb:/app\n",
        {
            "memory/app/memory.limit_in_bytes": "4096",
            "memory/memory.limit_in_bytes": "9223372036854771712",
        },
    ),
    "version 1, in a container": (
        "4:memory:/docker/0123\n",  # as it is called outside
        {"memory/memory.limit_in_bytes": "4096"},
    ),
}


@pytest.mark.parametrize(("groups", "files"), GROUPS.values(), ids=GROUPS)
def test_a_control_group_bounds_the_memory_at_hand(
    tmp_path: Path, groups: str, files: dict[str, str]
) -> None:
    tree = {"proc/self/cgroup": groups} | {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in tree.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert memory_at_hand(tmp_path) == 4096


def test_without_control_groups_it_is_the_machines(tmp_path: Path) -> None:
    machine = memory_at_hand(tmp_path)
    assert machine > 2**28
    assert memory_at_hand() <= machine
