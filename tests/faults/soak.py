"""New fault schedules for as long as one likes, on all cores: ``python -m tests.faults.soak --minutes 10``.

Prints what happened and writes it to ``--json``; ends with status 1 if any guarantee was broken.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from .figures import Report
from .schedule import Schedule, sample


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=None, help="the first; by default from the time of day")
    parser.add_argument("--json", type=Path, default=None, help="where to write the figures")
    options = parser.parse_args()
    first = time.time_ns() // 1_000_000 * 1_000 if options.seed is None else options.seed
    until_s = time.monotonic() + 60 * options.minutes
    print(f"seeds from {first}, {options.processes} processes, {options.minutes:g} minutes", flush=True)
    began_s = time.monotonic()
    with ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn")) as pool:
        parts = [
            pool.submit(_soak, first + number, options.processes, until_s)
            for number in range(options.processes)
        ]
        results = [part.result() for part in parts]
    summary = _summary(first, time.monotonic() - began_s, results)
    print(json.dumps(summary, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(summary, indent=2) + "\n")
    return 1 if summary["failures"] else 0


def _soak(first: int, stride: int, until_s: float) -> tuple[Report, float]:
    """One process's share; also, by how many MiB its memory grew after the first tenth."""
    report = Report()
    began_s = time.monotonic()
    warm = _Warm()

    def schedules() -> Iterator[tuple[str, Schedule]]:
        seed = first
        while (now_s := time.monotonic()) < until_s:
            warm.note(now_s - began_s > (until_s - began_s) / 10)
            yield f"sample({seed})", sample(seed)
            seed += stride

    report.run(schedules())
    for failure in report.failures:
        print(failure, file=sys.stderr, flush=True)
    return report, _peak_mib() - warm.peak_mib


class _Warm:
    """The most memory that was used until it was warm."""

    def __init__(self) -> None:
        self.peak_mib = 0.0
        self._is_warm = False

    def note(self, is_warm: bool) -> None:
        if not self._is_warm:
            self._is_warm, self.peak_mib = is_warm, _peak_mib()


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _summary(first: int, seconds: float, results: list[tuple[Report, float]]) -> dict[str, Any]:
    total = Report()
    for report, _ in results:
        total.figures += report.figures
        total.failures += report.failures
    figures = total.figures
    return {
        "first_seed": first,
        "seconds": round(seconds, 1),
        "processes": len(results),
        "python": platform.python_version(),
        "schedules": figures["schedules"],
        "failures": figures["failures"],
        "events": figures["events"],
        "steps": figures["steps"],
        "calls": _of(figures, "calls "),
        "submits": _of(figures, "submits "),
        "requests": _of(figures, "requests "),
        "memory_growth_mib": round(max(growth for _, growth in results), 1),
        "failing": total.failures,
    }


def _of(figures: dict[str, int], prefix: str) -> dict[str, int]:
    names = sorted(name for name in figures if name.startswith(prefix))
    return {name.removeprefix(prefix): figures[name] for name in names}


if __name__ == "__main__":
    sys.exit(main())
