"""Whether ``retinue simulate`` predicts: a batcher on a device that sleeps, and the simulation of the same.

    python -m benchmarks.simulation [--rounds 5] [--seconds 2]

The device of the simulation is fitted to the trace of a run of its own, with another load (half of what the
device serves, at random), so no figure is compared with what it was made of. Then, for each load and policy,
the trace of a real run stands beside its simulation: closed loops of callers who come back at once, and an
open loop whose trace, recorded with a cap of 16, says what a cap of 64 would do. Medians of rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.device import CAP, CAPACITY, Device
from benchmarks.measure import save
from retinue import ThreadedMicroBatcher
from retinue.batching.planner import Limits
from retinue.batching.recording import Recorder, Trace, read_trace
from retinue.tools import simulate as simulation
from retinue.tools.simulate import Callers, Figures, Policy, Replay, policies, recorded, simulate

FULL, NARROW = Limits(CAP), Limits(16)
WAITS_S = (0.002,)
NAMES = ("requests_per_s", "p50_ms", "p99_ms", "batch_items")

Batcher = ThreadedMicroBatcher[int, int]
Ask = Callable[[Batcher], Awaitable[object]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each run")
    options = parser.parse_args()
    pairs: dict[str, list[tuple[Figures, Figures]]] = {}
    for number in range(options.rounds):
        for name, truth, told in _round(options.seconds, number):
            pairs.setdefault(name, []).append((truth, told))
    print(f"{'':30}" + "".join(f"{name:>27}" for name in NAMES))
    for name, of_one in pairs.items():
        print(f"{name:30}" + "".join(f"{_beside(of_one, figure):>27}" for figure in NAMES))
    rounds = {name: [[asdict(one) for one in pair] for pair in of_one] for name, of_one in pairs.items()}
    print("written to", save("simulation", {"real and simulated": rounds}))


def _round(seconds: float, seed: int) -> list[tuple[str, Figures, Figures]]:
    """Name of a case, what was so, and what the simulation told."""
    device = simulation.Device.of(_run(Policy(FULL), _open(0.5, seconds, seed + 100)).batches)
    found = []
    for count in (1, 8, 64):
        callers = Callers(count=count, for_s=seconds)
        for policy in policies([FULL], WAITS_S):
            truth = recorded(_run(policy, _closed(count, seconds)))
            found.append((f"{count} callers, {policy.name}", truth, simulate(callers, device, policy)))
    for load in (0.5, 0.65):
        yesterday = _run(Policy(NARROW), _open(load, seconds, seed))
        today = recorded(_run(Policy(FULL), _open(load, seconds, seed)))
        told = simulate(Replay(yesterday.requests), simulation.Device.of(yesterday.batches), Policy(FULL))
        found.append((f"cap 64 out of 16, at {load:.0%}", today, told))
    return found


def _beside(pairs: list[tuple[Figures, Figures]], name: str) -> str:
    real, told = (median(getattr(one, name) for one in ones) for ones in zip(*pairs, strict=True))
    return f"{real:.2f} {told:.2f} ({told / real - 1:+.1%})"


def _run(policy: Policy, ask: Ask) -> Trace:
    """The trace of a real run."""

    async def serve(recorder: Recorder) -> None:
        async with Batcher(
            Device(),
            max_batch_cost=policy.limits.max_batch_cost,
            max_wait_s=policy.max_wait_s,
            observer=recorder,
        ) as batcher:
            await ask(batcher)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.jsonl")
        with Recorder(path, policy.limits) as recorder:
            asyncio.run(serve(recorder))
        return read_trace(path)


def _closed(count: int, seconds: float) -> Ask:
    async def ask(batcher: Batcher) -> None:
        ends_s = time.perf_counter() + seconds

        async def call() -> None:
            while time.perf_counter() < ends_s:
                await batcher.submit([0])

        await asyncio.gather(*(call() for _ in range(count)))

    return ask


def _open(load: float, seconds: float, seed: int) -> Ask:
    """Requests that come at random; from a thread, for an event loop's timers are a millisecond apart."""
    rng, rate = random.Random(seed), load * CAPACITY
    arrivals = list(accumulate(rng.expovariate(rate) for _ in range(int(rate * seconds))))

    async def ask(batcher: Batcher) -> None:
        loop, requests = asyncio.get_running_loop(), set[asyncio.Task[Any]]()

        def send() -> None:
            began_s = time.perf_counter()
            for at_s in arrivals:
                if (early_s := began_s + at_s - time.perf_counter()) > 0:
                    time.sleep(early_s)
                loop.call_soon_threadsafe(lambda: requests.add(loop.create_task(batcher.submit([0]))))

        await asyncio.to_thread(send)
        await asyncio.sleep(0)  # the last has arrived
        await asyncio.gather(*requests)

    return ask


if __name__ == "__main__":
    main()
