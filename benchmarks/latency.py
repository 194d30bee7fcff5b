"""Rounds whose figures are several: throughput, latency, and how full the calls were."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from benchmarks.measure import interleaved


class Round(NamedTuple):
    """What one contender did in one round."""

    per_s: float
    p50_ms: float
    p99_ms: float
    mean_batch: float | None = None  # None where the device is in another process

    @classmethod
    def of(cls, latencies_s: Sequence[float], seconds: float, mean_batch: float | None = None) -> Round:
        """Of requests that took so long, within so many seconds."""
        ordered = sorted(latencies_s)
        p50_s, p99_s = (ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.99))
        return cls(len(ordered) / seconds, p50_s * 1e3, p99_s * 1e3, mean_batch)


def compare(contenders: Mapping[str, Callable[[int], Round]], rounds: int) -> dict[str, Any]:
    """Run all, interleaved, each with the number of its round; print and return medians and rounds."""
    done: dict[str, list[Round]] = {name: [] for name in contenders}

    def one(name: str) -> float:
        done[name].append(contenders[name](len(done[name])))
        return done[name][-1].p99_ms

    interleaved({name: partial(one, name) for name in contenders}, rounds)
    counted = {name: of_one[1:] for name, of_one in done.items()}
    typical = {
        name: {
            figure: None if None in values else median(values)
            for figure, values in zip(Round._fields, zip(*of_one, strict=True), strict=True)
        }
        for name, of_one in counted.items()
    }
    for name, of_one in typical.items():
        ms = f"p50 {of_one['p50_ms']:7.2f} ms  p99 {of_one['p99_ms']:7.2f} ms"
        batch = "" if of_one["mean_batch"] is None else f"  {of_one['mean_batch']:5.1f} a call"
        print(f"  {name:22} {of_one['per_s']:8.0f}/s  {ms}{batch}", flush=True)
    rounds_of = {name: [one._asdict() for one in of_one] for name, of_one in counted.items()}
    return {"median": typical, "rounds": rounds_of}
