"""Whether waiting for company pays without a setting: a closed loop of callers on a simulated accelerator.

    python -m benchmarks.coalescing [--rounds 7] [--seconds 0.6] [--reference PATH/TO/batcher.py]

Each caller submits one item, waits for its result, thinks for a uniform time up to the jitter, and begins
again. Contenders, interleaved in rounds within one process: ``ThreadedMicroBatcher`` as it is, the same with
each fixed ``max_wait_s`` (0 is eager), and the reference if its path is given.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.device import CAP, Device
from benchmarks.latency import Round, compare
from benchmarks.measure import save
from benchmarks.overhead import Submit, load
from retinue import BatchRecord, RequestRecord, ThreadedMicroBatcher

LOOPS = ((1, 0.0), (2, 0.0), (8, 0.0005), (16, 0.002), (64, 0.0), (64, 0.002), (64, 0.005))
WAITS_MS = (0, 0.5, 1, 2, 4)

Make = Callable[[Device], Any]  # a batcher around a device


class Gaps:
    """An observer that keeps what passed between two calls, besides holds."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_batch(self, record: BatchRecord) -> None:
        self.seconds.append(record.gap_s)

    def on_request(self, record: RequestRecord) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.6)
    parser.add_argument("--reference", type=Path, help="batcher.py out of the ai-dynamo wheel")
    options = parser.parse_args()

    makes: dict[str, Make] = {"retinue": partial(ThreadedMicroBatcher, max_batch_cost=CAP)}
    for wait_ms in WAITS_MS:
        makes[f"waits {wait_ms:g} ms"] = partial(
            ThreadedMicroBatcher, max_batch_cost=CAP, max_wait_s=wait_ms / 1e3
        )
    if options.reference:
        makes["reference"] = partial(load(options.reference).ThreadedMicroBatcher, max_batch_cost=CAP)

    report: dict[str, Any] = {}
    for callers, jitter_s in LOOPS:
        title = _title(callers, jitter_s)
        print(title)
        contenders = {
            name: partial(_round, make, callers, jitter_s, options.seconds) for name, make in makes.items()
        }
        report[title] = of_loop = compare(contenders, options.rounds)
        typical = of_loop["median"]
        best = max((name for name in typical if name.startswith("waits")), key=lambda n: typical[n]["per_s"])
        of_loop["against"] = {
            name: {
                figure: typical["retinue"][figure] / typical[name][figure]
                for figure in ("per_s", "p50_ms", "p99_ms")
            }
            for name in typical
        }
        of_loop["best"] = best
        ratios = of_loop["against"][best]
        print(f"  of the best ({best}): {ratios['per_s']:.3f} of its throughput, p99 {ratios['p99_ms']:.3f}")
    gaps_us = {_title(*loop): _gap_us(*loop) for loop in LOOPS}
    print("median gap between two calls:", ", ".join(f"{name}: {us:.0f} us" for name, us in gaps_us.items()))
    print("written to", save("coalescing", {"loops": report, "median_gap_us": gaps_us}))


def _title(callers: int, jitter_s: float) -> str:
    return f"{callers} callers, {jitter_s * 1e3:g} ms"


def _round(make: Make, callers: int, jitter_s: float, seconds: float, number: int) -> Round:
    device = Device()
    with _running(make(device)) as submit:
        began_s = time.perf_counter()
        latencies_s = asyncio.run(_closed_loop(submit, callers, jitter_s, seconds, number))
        return Round.of(latencies_s, time.perf_counter() - began_s, device.items / device.calls)


def _gap_us(callers: int, jitter_s: float) -> float:
    gaps = Gaps()
    batcher: Any = ThreadedMicroBatcher(Device(), max_batch_cost=CAP, observer=gaps)
    with _running(batcher) as submit:
        asyncio.run(_closed_loop(submit, callers, jitter_s, 2.0, 1))
    return statistics.median(gaps.seconds) * 1e6


@contextmanager
def _running(batcher: Any) -> Any:
    batcher.start()
    try:
        yield batcher.submit
    finally:
        batcher.shutdown()


async def _closed_loop(
    submit: Submit, callers: int, jitter_s: float, seconds: float, seed: int
) -> list[float]:
    thinks = random.Random(seed)
    latencies_s: list[float] = []
    until_s = time.perf_counter() + seconds

    async def caller() -> None:
        while (began_s := time.perf_counter()) < until_s:
            await submit([0])
            latencies_s.append(time.perf_counter() - began_s)
            if jitter_s:
                await asyncio.sleep(thinks.uniform(0, jitter_s))

    await asyncio.gather(*(caller() for _ in range(callers)))
    return latencies_s


if __name__ == "__main__":
    main()
