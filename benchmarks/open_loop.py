"""Latency under a load that does not wait for answers: Poisson arrivals on a simulated device.

    python -m benchmarks.open_loop [--rounds 5] [--seconds 1] [--peers .bench]

Requests of one item arrive at 30, 70, 90 and 95 % of what the device serves in full calls (``device``), at
the same moments for every contender (``in_process``), and anew in each round. They come from a thread of
their own, because an event loop's timers are only good to a millisecond; a latency counts from the moment
when the request was due. The first fifth of a round does not count. Contenders are interleaved in rounds
within one process.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path

from benchmarks.device import CAP, CAPACITY, Device
from benchmarks.in_process import PEERS, Contender, contenders
from benchmarks.latency import Round, compare
from benchmarks.measure import save

LOADS = (0.3, 0.7, 0.9, 0.95)
_WARM_UP = 0.2  # of a round


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of arrivals in a round")
    parser.add_argument("--peers", type=Path, default=PEERS, help="folder with the peers' packages")
    options = parser.parse_args()
    known, report = contenders(options.peers), {}
    for load in LOADS:
        print(f"{load:.0%} of {CAPACITY:.0f} requests/s")
        report[f"{load:.0%}"] = compare(
            {name: partial(_round, one, load, options.seconds) for name, one in known.items()}, options.rounds
        )
    print("written to", save("open_loop", {"loads": report}, ("ai-dynamo", "batched", "async-batcher")))


def _round(contender: Contender, load: float, seconds: float, number: int) -> Round:
    return asyncio.run(_serve(contender, _poisson(load * CAPACITY, seconds, seed=number)))


def _poisson(rate: float, seconds: float, seed: int) -> list[float]:
    """Moments within ``seconds`` at which requests are due."""
    rng = random.Random(seed)
    return list(accumulate(rng.expovariate(rate) for _ in range(int(rate * seconds))))


async def _serve(contender: Contender, arrivals: Sequence[float]) -> Round:
    device, latencies_s = Device(), [0.0] * len(arrivals)
    loop, requests = asyncio.get_running_loop(), set()

    async def request(number: int, due_s: float) -> None:
        await submit(number)
        latencies_s[number] = time.perf_counter() - due_s

    def arrive(number: int, due_s: float) -> None:
        requests.add(loop.create_task(request(number, due_s)))

    def send() -> None:
        began_s = time.perf_counter() + 0.01
        for number, at_s in enumerate(arrivals):
            due_s = began_s + at_s
            if (early_s := due_s - time.perf_counter()) > 0:
                time.sleep(early_s)
            loop.call_soon_threadsafe(arrive, number, due_s)

    async with contender(device, CAP) as submit:
        await asyncio.to_thread(send)
        await asyncio.sleep(0)  # the last has arrived
        await asyncio.gather(*requests)
    first = int(_WARM_UP * len(arrivals))
    return Round.of(latencies_s[first:], arrivals[-1] - arrivals[first], device.items / device.calls)


if __name__ == "__main__":
    main()
