"""``examples/vllm_worker.py``: as a program, and what becomes of a request whose caller leaves."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from torch import Tensor
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase

from retinue.demo.encoder import CHECKPOINT, DigitsEncoder
from retinue.demo.prompt import QUESTION
from retinue.encoder import AsyncVisionEncoder

from .conftest import run

pytestmark = pytest.mark.timeout(180)
one_loop = pytest.mark.asyncio(loop_scope="module")  # the engine's

EXAMPLE = Path(__file__).parents[2] / "examples" / "vllm_worker.py"
PICTURE = next(CHECKPOINT.with_name("pictures").glob("7-rendered-*")).read_bytes()
SHORT = SamplingParams(temperature=0, max_tokens=8)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


def test_the_example_answers_concurrent_requests_and_ends_well() -> None:
    ended = run(sys.executable, str(EXAMPLE), timeout_s=170)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    lines = [line.split(": ") for line in ended.stdout.splitlines()]
    assert len(lines) == 12
    for number, (names, said) in enumerate(lines):
        assert said == ("(left)" if number == 5 else "".join(name[0] for name in names.split(", ")))


# ---- callers who leave


class Watch(StatLoggerBase):  # type: ignore[misc]  # vLLM's types are elsewhere
    """What the engine's own process tells of itself at each step."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.running: list[int] = []
        self.generated = 0
        self.finished = 0
        self._changed = asyncio.Event()

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        if scheduler_stats is not None:
            self.running.append(scheduler_stats.num_running_reqs)
        if iteration_stats is not None:
            self.generated += iteration_stats.num_generation_tokens
            self.finished += len(iteration_stats.finished_requests)
        self._changed.set()

    def log_engine_initialized(self) -> None:
        pass

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), 60)


class Gated(DigitsEncoder):
    """``DigitsEncoder`` whose first forward waits until it is let go, and which counts its pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.forwarded = 0
        self.inside, self.go_on = threading.Event(), threading.Event()

    def forward_batch(self, items: Sequence[Tensor], target_bucket: int | None = None) -> list[Tensor]:
        self.forwarded += len(items)
        self.inside.set()
        assert self.go_on.wait(60)
        return super().forward_batch(items)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine() -> AsyncIterator[tuple[AsyncLLM, Watch]]:
    watches: list[Watch] = []

    def watch(vllm_config: Any, engine_index: int) -> Watch:
        watches.append(Watch(vllm_config, engine_index))
        return watches[-1]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=str(CHECKPOINT), dtype="float32", enable_prompt_embeds=True, enforce_eager=True
            ),
            stat_loggers=[watch],
        )
    context = made.engine_core.resources.ctx
    yield made, watches[0]
    made.shutdown()
    context.destroy()  # vLLM leaves that to the garbage collector, which complains


def worker(encoder: Any, engine: AsyncLLM, params: SamplingParams) -> Any:
    """The example's ``Worker``."""
    spec = importlib.util.spec_from_file_location("vllm_worker", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Worker(encoder, engine, params)


@one_loop
async def test_a_caller_who_leaves_aborts_the_generation_in_the_engine(
    engine: tuple[AsyncLLM, Watch],
) -> None:
    llm, watch = engine
    async with AsyncVisionEncoder(DigitsEncoder(), "demo") as encoder:
        leaver = asyncio.create_task(worker(encoder, llm, LONG).answer([PICTURE], QUESTION))
        await watch.until(lambda: watch.generated >= 3)
        leaver.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaver
        before = watch.generated
        watch.running.clear()
        assert await worker(encoder, llm, SHORT).answer([PICTURE], QUESTION) == "7"
    assert before < LONG.max_tokens
    assert max(watch.running) == 1  # and not 2: the leaver runs no more


@one_loop
async def test_a_caller_who_leaves_before_its_batch_reaches_neither_encoder_nor_engine(
    engine: tuple[AsyncLLM, Watch],
) -> None:
    llm, watch = engine
    backend = Gated()
    finished = watch.finished
    async with AsyncVisionEncoder(backend, "demo") as encoder:
        asked = worker(encoder, llm, SHORT)
        stays = asyncio.create_task(asked.answer([PICTURE], QUESTION))
        await asyncio.to_thread(backend.inside.wait)
        leaves = asyncio.create_task(asked.answer([PICTURE, PICTURE], QUESTION))
        while encoder.pending().items < 2:  # noqa: ASYNC110  # until its pictures wait for a batch
            await asyncio.sleep(0.001)
        leaves.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaves
        backend.go_on.set()
        assert await stays == "7"
    assert backend.forwarded == 1
    assert watch.finished == finished + 1
