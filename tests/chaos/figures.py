"""What the soaks found, as the table of docs/reliability.md: ``python -m tests.chaos.figures FOLDER``.

``FOLDER`` has ``schedules.json``, ``hygiene.json`` and ``chaos.json``, which the three soaks have written.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["BEGIN", "END", "replaced", "table"]

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN = "<!-- figures: make soak writes from here -->"
END = "<!-- to here -->"


def table(schedules: Mapping[str, Any], hygiene: Mapping[str, Any], chaos: Mapping[str, Any]) -> str:
    """The figures of one ``make soak``, in Markdown."""
    answers = chaos["answers"]
    health = f"{chaos['health_median_ms']:.1f}, {chaos['health_p99_ms']:.0f}, {chaos['health_max_ms']:.0f}"
    rows = [
        ("Fault schedules", ""),
        ("schedules", f"{schedules['schedules']:,} in {schedules['seconds']:.0f} s"),
        ("that break a guarantee", f"{schedules['failures']:,}"),
        ("events, steps of the actor", f"{schedules['events']:,}, {schedules['steps']:,}"),
        ("calls, by how they ended", _counts(schedules["calls"])),
        ("requests, by how they ended", _counts(schedules["requests"])),
        ("growth of memory after the first tenth", f"{schedules['memory_growth_mib']} MiB"),
        ("Hygiene", ""),
        ("requests", f"{hygiene['requests']:,} in {hygiene['seconds']:.0f} s"),
        ("by how they ended", _counts(hygiene["outcomes"])),
        ("retained", ", ".join(hygiene["retained"]) or "nothing"),
        ("growth of the process", f"{hygiene['blocks_grown']:,} blocks, {_mib(hygiene['bytes_grown'])}"),
        ("Chaos", ""),
        ("answers, by status", f"{sum(answers.values()):,} in {chaos['seconds']:.0f} s: {_counts(answers)}"),
        ("that are wrong or not honest, and other broken promises", f"{len(chaos['problems']):,}"),
        ("clients that left, by stage", _counts(chaos["left"])),
        ("forwards, of which failed", f"{chaos['calls']:,}, {chaos['failed_calls']:,}"),
        ("backends lost, calls stuck", f"{chaos['losses']}, {chaos['stuck_calls']}"),
        ("upstreams killed, connections to them refused or cut", f"{chaos['deaths']}, {chaos['cuts']:,}"),
        (f"`/health`, {chaos['health_asked']:,} times: median, p99, longest", f"{health} ms"),
        *((f"memory of the {name} server", _memory(chaos, name)) for name in chaos["resident_bytes"]),
    ]
    lines = ["| | |", "| --- | --- |", *(f"| {_bold(name, found)} | {found} |" for name, found in rows)]
    return "\n".join([_when(schedules, hygiene, chaos), "", *lines])


def _bold(name: str, found: str) -> str:
    return name if found else f"**{name}**"


def _when(*figures: Mapping[str, Any]) -> str:
    seeds = ", ".join(str(one.get("seed", one.get("first_seed"))) for one in figures)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    return f"`make soak`, {time.strftime('%Y-%m-%d')}, {machine}; seeds {seeds}."


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {count:,}" for name, count in counts.items())


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _memory(chaos: Mapping[str, Any], name: str) -> str:
    sizes, blocks = chaos["resident_bytes"][name], chaos["blocks"][name]
    return (
        f"{_mib(sizes[0])} and {blocks[0]:,} blocks of Python's after the warm-up, "
        f"{_mib(sizes[-1])} and {blocks[-1]:,} at the end"
    )


def replaced(page: str, figures: str) -> str:
    """``page`` with ``figures`` between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"the page needs two lines, {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n{figures}\n{END}{after}"


def main() -> None:
    """Rewrite the page."""
    folder = Path(sys.argv[1])
    found = [json.loads((folder / f"{name}.json").read_text()) for name in ("schedules", "hygiene", "chaos")]
    PAGE.write_text(replaced(PAGE.read_text(), table(*found)))
    print(f"written to {PAGE}")


if __name__ == "__main__":
    main()
