"""What scheduling costs: a closed loop of callers, a no-op ``fn``, requests of one item.

    python -m benchmarks.overhead [--rounds 15] [--reference PATH/TO/batcher.py]

Contenders, interleaved in rounds within one process:
    floor      the least that any such batcher must do: a deque, one wake-up, one call into the loop per batch
    retinue    ``ThreadedMicroBatcher`` with its defaults
    reference  NVIDIA Dynamo's ``ThreadedMicroBatcher``, loaded from the ai-dynamo wheel, if its path is given
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import importlib.util
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import interleaved, medians, save
from retinue.batching import ThreadedMicroBatcher

CALLERS = (1, 256, 2048)
Submit = Callable[[list[int]], Awaitable[Sequence[int]]]


class Floor:
    """No checks, no errors, no cancellation, no shutdown worth the name: only the hand-over and back."""

    def __init__(self, fn: Callable[[list[Any]], Sequence[Any]]) -> None:
        self._fn = fn
        self._queue: collections.deque[tuple[Any, asyncio.Future[Any]]] = collections.deque()
        self._wake = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()

    async def submit(self, items: list[Any]) -> list[Any]:
        self._loop = asyncio.get_running_loop()
        future = self._loop.create_future()
        self._queue.append((items[0], future))
        if not self._wake.is_set():
            self._wake.set()
        return [await future]

    def shutdown(self) -> None:
        self._closed = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            if self._closed:
                return
            batch = []
            while self._queue:
                batch.append(self._queue.popleft())
            if batch:
                results = self._fn([item for item, _ in batch])
                self._loop.call_soon_threadsafe(self._deliver, batch, results)

    @staticmethod
    def _deliver(batch: list[tuple[Any, asyncio.Future[Any]]], results: Sequence[Any]) -> None:
        for (_, future), result in zip(batch, results, strict=True):
            future.set_result(result)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--reference", type=Path, help="batcher.py out of the ai-dynamo wheel")
    options = parser.parse_args()

    kinds: dict[str, Callable[[], Any]] = {
        "floor": lambda: Floor(_no_op),
        "retinue": lambda: ThreadedMicroBatcher(_no_op),
    }
    if options.reference:
        reference = load(options.reference)
        kinds["reference"] = lambda: reference.ThreadedMicroBatcher(_no_op)

    report: dict[str, Any] = {}
    for callers in CALLERS:
        turns = 2048 if callers == 1 else 32
        contenders = {name: partial(_us_per_request, make, callers, turns) for name, make in kinds.items()}
        figures = interleaved(contenders, options.rounds)
        typical = medians(figures)
        report[f"{callers} callers"] = {"median_us_per_request": typical, "rounds": figures}
        line = "  ".join(
            f"{name} {us:6.2f} us ({us / typical['floor']:.2f}x the floor)" for name, us in typical.items()
        )
        print(f"{callers:5d} callers: {line}", flush=True)
    growth = {
        name: report["2048 callers"]["median_us_per_request"][name]
        / report["256 callers"]["median_us_per_request"][name]
        for name in kinds
    }
    print("2048 against 256 callers: " + ", ".join(f"{name} {ratio:.2f}x" for name, ratio in growth.items()))
    print("written to", save("overhead", {"callers": report, "growth": growth}))


def _no_op(items: list[Any]) -> list[Any]:
    return items


def load(path: Path) -> Any:
    """The module in the file at ``path``, which is not on the import path."""
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def _us_per_request(make: Callable[[], Any], callers: int, turns: int) -> float:
    batcher = make()
    batcher.start()
    try:
        return asyncio.run(_closed_loop(batcher.submit, callers, turns))
    finally:
        batcher.shutdown()


async def _closed_loop(submit: Submit, callers: int, turns: int) -> float:
    async def caller() -> None:
        for turn in range(turns):
            await submit([turn])

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    return (time.perf_counter() - began) / (callers * turns) * 1e6


if __name__ == "__main__":
    main()
