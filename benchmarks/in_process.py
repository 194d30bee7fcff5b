"""Batchers that run in their caller's process, each behind the same ``await submit(item)``.

    retinue        ``ThreadedMicroBatcher``; nothing is set but the cap
    reference      NVIDIA Dynamo's ``ThreadedMicroBatcher``, from the ai-dynamo wheel; nothing else can be set
    batched        ``batched.dynamically``, for a function that blocks, through ``acall``
    async-batcher  ``AsyncBatcher`` with a ``process_batch`` that blocks, so it runs in an executor

The last two wait for company for a time that their user sets. Each is here twice: with what its documentation
has, and with a short wait. (At 0 ms ``batched`` does not sleep at all: it spins.)
"""

from __future__ import annotations

import concurrent.futures
import importlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.overhead import load
from retinue import ThreadedMicroBatcher

PEERS = Path(".bench")  # where ``make bench`` puts their packages
_REFERENCE = "dynamo/vllm/multimodal_utils/custom_encoder/batcher.py"

Fn = Callable[[list[Any]], list[Any]]
Submit = Callable[[Any], Awaitable[Any]]
Contender = Callable[[Fn, int], AbstractAsyncContextManager[Submit]]  # of a function and its cap


def contenders(folder: Path) -> dict[str, Contender]:
    """All of them by name; the peers' packages are in ``folder``."""
    sys.path.append(str(folder))
    return {
        "retinue": retinue,
        "reference": partial(reference, load(folder / _REFERENCE)),
        "batched, 5 ms": partial(batched, 5.0),
        "batched, 1 ms": partial(batched, 1.0),
        "async-batcher, 10 ms": partial(async_batcher, 0.01),
        "async-batcher, 0 ms": partial(async_batcher, 0.0),
    }


@asynccontextmanager
async def retinue(fn: Fn, cap: int) -> AsyncIterator[Submit]:
    """With its defaults."""
    async with ThreadedMicroBatcher[Any, Any](fn, max_batch_cost=cap) as batcher:

        async def submit(item: Any) -> Any:
            return (await batcher.submit([item]))[0]

        yield submit


@asynccontextmanager
async def reference(module: Any, fn: Fn, cap: int) -> AsyncIterator[Submit]:
    """With its defaults."""
    batcher = module.ThreadedMicroBatcher(fn, max_batch_cost=cap)
    batcher.start()

    async def submit(item: Any) -> Any:
        return (await batcher.submit([item]))[0]

    try:
        yield submit
    finally:
        batcher.shutdown()


@asynccontextmanager
async def batched(timeout_ms: float, fn: Fn, cap: int) -> AsyncIterator[Submit]:
    """``timeout_ms``: it sleeps for so long whenever less than a full batch waits; 5 by default."""
    decorated = importlib.import_module("batched").dynamically(batch_size=cap, timeout_ms=timeout_ms)(fn)
    try:
        yield decorated.acall
    finally:
        decorated.shutdown()


@asynccontextmanager
async def async_batcher(max_queue_time: float, fn: Fn, cap: int) -> AsyncIterator[Submit]:
    """``max_queue_time``: seconds that a batch is waited for, 0.01 by default."""
    base = importlib.import_module("async_batcher.batcher").AsyncBatcher
    cls = type("Batcher", (base,), {"process_batch": lambda self, batch: fn(batch)})
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        batcher = cls(max_batch_size=cap, max_queue_time=max_queue_time, executor=executor)
        try:
            yield batcher.process
        finally:
            await batcher.stop(force=True)
