"""How many calls the planner needs for what waits, whom it lets overtake, and how long it takes to decide.

    python -m benchmarks.packing [--drains 40] [--rounds 15] [--against PATH/TO/planner.py]

For each mix of costs:
    drain    400 items wait and none arrive: calls, against the least that their sum allows, ceil(sum / cap).
             Some sums cannot be reached, as where no two items fit together; ``least_calls`` is nearer then.
    steady   whatever a batch takes is replaced, so that 400 always wait: the same, over 600 batches
    most overtaken   by how many batches the unluckiest item was passed over, in all of these
    plan     time to plan one batch of 1,000 that wait; the other planner's rounds, if its path is given, are
             interleaved with ours

The calls depend on no clock: they are the same on every machine.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import interleaved, medians, save
from benchmarks.overhead import load
from retinue.batching import planner

WAITING = 400
STEADY_BATCHES = 600
PLANNED_FROM = 1000
PLANS = 20  # timed at once

Cost = Callable[[random.Random], int]


@dataclass(frozen=True)
class Mix:
    name: str
    cap: int
    cost: Cost
    keys: int = 1
    is_typical: bool = True  # of what vision encoders are sent


def visual_tokens(chance: random.Random) -> int:
    """Pictures of all sizes, as a model of dynamic resolution sees them: 64 to 1,280, log-uniform."""
    return round(math.exp(chance.uniform(math.log(64), math.log(1280))))


def small_and_large(chance: random.Random) -> int:
    return chance.randint(64, 256) if chance.random() < 0.7 else chance.randint(900, 1280)


def tiles(tokens: int, most: int, chance: random.Random) -> int:
    """Up to ``most`` tiles, and an overview beside more than one."""
    count = chance.randint(1, most)
    return tokens * (count + (count > 1))


def thumbnails_and_documents(documents: float, chance: random.Random) -> int:
    return 1500 if chance.random() < documents else 64


MIXES = [
    Mix("visual tokens", 4096, visual_tokens),
    Mix("visual tokens, cap 8192", 8192, visual_tokens),
    Mix("small and large", 4096, small_and_large),
    Mix("small and large, cap 8192", 8192, small_and_large),
    Mix("1 to 12 tiles of 256", 4096, partial(tiles, 256, 12)),
    Mix("1 to 12 tiles of 256, cap 8192", 8192, partial(tiles, 256, 12)),
    Mix("1 to 4 tiles of 576", 4096, partial(tiles, 576, 4)),
    Mix("1 to 4 tiles of 576, cap 8192", 8192, partial(tiles, 576, 4)),
    Mix("576 each", 4096, lambda chance: 576),
    Mix("thumbnails, 10 % documents", 4096, partial(thumbnails_and_documents, 0.1)),
    Mix("thumbnails, 10 % documents, cap 8192", 8192, partial(thumbnails_and_documents, 0.1)),
    # Made to be hard, here and below
    Mix("thumbnails, 20 % documents", 4096, partial(thumbnails_and_documents, 0.2), is_typical=False),
    Mix("7, 6, 3 or 4, cap 10", 10, lambda chance: chance.choice((7, 6, 3, 4)), is_typical=False),
    Mix("anything up to the cap", 4096, lambda chance: chance.randint(1, 4096), is_typical=False),
    Mix("just over half of the cap", 4096, lambda chance: chance.randint(2049, 2500), is_typical=False),
    Mix("close to the cap", 4096, lambda chance: chance.randint(3600, 4096), is_typical=False),
    Mix("cost 1, cap 256", 256, lambda chance: 1, is_typical=False),
    Mix("a key for each", 4096, visual_tokens, keys=PLANNED_FROM, is_typical=False),
]


class Queue:
    """Works of one mix, waiting at one of the planners; counts who is overtaken how often."""

    def __init__(self, module: Any, mix: Mix, seed: int) -> None:
        self.mix = mix
        self.chance = random.Random(seed)
        self.waiting = module.Waiting()
        self.limits = module.Limits(max_batch_cost=mix.cap)
        self.overtaken: dict[int, int] = {}  # by arrival, of all that wait
        self.most_overtaken = 0
        self.cost = 0  # of all that ever waited

    def fill(self, count: int) -> None:
        for _ in range(count - len(self.waiting)):
            arrival = self.waiting.arrivals
            cost = self.mix.cost(self.chance)
            self.waiting.add((arrival, cost, None, 0), arrival % self.mix.keys)
            self.overtaken[arrival] = 0
            self.cost += cost

    def plan(self) -> Any:
        return self.waiting.plan(self.limits)

    def serve(self) -> int:
        """Take one batch out; returns its cost."""
        plan = self.plan()
        self.waiting.claim(plan)
        batch = {work[0] for work in plan.works}
        for arrival in batch:
            del self.overtaken[arrival]
        for arrival in self.overtaken:  # in order
            if arrival > max(batch):
                break
            if arrival % self.mix.keys == plan.key:
                self.overtaken[arrival] += 1
                self.most_overtaken = max(self.most_overtaken, self.overtaken[arrival])
        return int(plan.cost)


def least_calls(costs: list[int], cap: int) -> int:
    """No order needs fewer calls. It is ceil(sum / cap), or more where items cost much of the cap.

    With k + 1 equal steps up to the cap, an item that costs more than j of them takes j / k of a call, for
    no call can hold more than k such steps. After Fekete and Schepers, "New classes of fast lower bounds for
    bin packing problems" (2001).
    """
    bounds = [math.ceil(sum(costs) / cap)]
    for k in range(1, 21):
        steps = [
            # An item that costs just a whole number of steps counts as what it is.
            k * cost if (k + 1) * cost % cap == 0 else cap * ((k + 1) * cost // cap)
            for cost in costs
        ]
        bounds.append(-(-sum(steps) // (k * cap)))
    return max(bounds)


def drain(module: Any, mix: Mix, seed: int) -> dict[str, int]:
    queue = Queue(module, mix, seed)
    queue.fill(WAITING)
    costs = [work[1] for work in queue.waiting.works()]
    calls = 0
    while queue.waiting:
        queue.serve()
        calls += 1
    return {
        "calls": calls,
        "lower_bound": math.ceil(sum(costs) / mix.cap),
        "least_calls": least_calls(costs, mix.cap),
        "most_overtaken": queue.most_overtaken,
    }


def steady(module: Any, mix: Mix) -> dict[str, float]:
    queue = Queue(module, mix, seed=1)
    cost = 0
    for number in range(-WAITING // 4, STEADY_BATCHES):  # the first are not like those that follow
        queue.fill(WAITING)
        batch_cost = queue.serve()
        cost += batch_cost if number >= 0 else 0
    return {"calls_per_bound": STEADY_BATCHES * mix.cap / cost, "most_overtaken": queue.most_overtaken}


def packing(module: Any, mix: Mix, drains: int) -> dict[str, Any]:
    runs = [drain(module, mix, seed) for seed in range(drains)]
    columns = {name: [run[name] for run in runs] for name in ("calls", "lower_bound", "least_calls")}
    calls = sum(columns["calls"])
    under_load = steady(module, mix)
    return {
        "calls_per_bound": calls / sum(columns["lower_bound"]),
        "worst_drain": max(run["calls"] / run["lower_bound"] for run in runs),
        "calls_per_least": calls / sum(columns["least_calls"]),
        "steady": under_load["calls_per_bound"],
        "most_overtaken": max(under_load["most_overtaken"], *(run["most_overtaken"] for run in runs)),
        "drains": columns,
    }


def plan_us(module: Any, mix: Mix) -> Callable[[], float]:
    """Time to plan one batch, as it is after many: some have been passed over."""
    queue = Queue(module, mix, seed=1)
    for _ in range(60):
        queue.fill(PLANNED_FROM)
        queue.serve()
    queue.fill(PLANNED_FROM)

    def measure() -> float:
        began = time.perf_counter()
        for _ in range(PLANS):
            queue.plan()
        return (time.perf_counter() - began) / PLANS * 1e6

    return measure


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--drains", type=int, default=40, help="of different items, for each mix")
    parser.add_argument("--rounds", type=int, default=15, help="of timing")
    parser.add_argument("--against", type=Path, help="another revision's planner.py")
    options = parser.parse_args()

    modules: dict[str, Any] = {"retinue": planner}
    if options.against:
        modules["other"] = load(options.against)
    report: dict[str, Any] = {}
    for mix in MIXES:
        packed = {}
        if mix.keys == 1:
            packed = {name: packing(module, mix, options.drains) for name, module in modules.items()}
        rounds = interleaved({name: plan_us(module, mix) for name, module in modules.items()}, options.rounds)
        typical_us = medians(rounds)
        report[mix.name] = {
            "cap": mix.cap,
            "is_typical": mix.is_typical,
            "packing": packed,
            "median_plan_us": typical_us,
            "rounds_us": rounds,
        }
        for name in modules:
            line = f"{mix.name:36s} {name:8s} plan {typical_us[name]:6.1f} us"
            if packed:
                it = packed[name]
                line += (
                    f"  calls {it['calls_per_bound']:.3f}x the bound (worst {it['worst_drain']:.3f}x),"
                    f" {it['calls_per_least']:.3f}x the least; steady {it['steady']:.3f}x;"
                    f" most overtaken {it['most_overtaken']}"
                )
            print(line, flush=True)
    print("written to", save("packing", {"mixes": report}))


if __name__ == "__main__":
    main()
