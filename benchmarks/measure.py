"""Interleaved rounds and medians: these machines are noisy, so only ratios within one run count."""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def interleaved(contenders: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run every contender once a round, after one round that does not count; return its figures by name."""
    figures: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, contender in contenders.items():
            figure = contender()
            if number:
                figures[name].append(figure)
    return figures


def medians(figures: Mapping[str, list[float]]) -> dict[str, float]:
    """The median of each contender's rounds."""
    return {name: statistics.median(values) for name, values in figures.items()}


def save(name: str, results: Mapping[str, Any], packages: tuple[str, ...] = ()) -> Path:
    """Write raw figures with the command, machine and versions that they come from."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    report = {
        "command": " ".join(["python -m", f"benchmarks.{name}", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {_cores()} cores, {_processor()}",
        "versions": {"python": platform.python_version()} | {p: metadata.version(p) for p in packages},
        **results,
    }
    path.write_text(json.dumps(report, indent=1) + "\n")
    return path


def _cores() -> int:
    import os

    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
