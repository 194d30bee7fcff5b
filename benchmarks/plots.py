"""Draws what the benchmarks found into docs/, as SVG that follows the reader's light or dark theme.

    python -m benchmarks.plots

A bar or a point is a median over rounds; the thin line in a bar reaches from the least to the greatest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.measure import RESULTS

_DOCS = Path(__file__).parent.parent / "docs"
_STYLE = """<style>
text { font: 12px sans-serif; fill: #1f2328 } .quiet { fill: #59636e }
.title { font-size: 14px; font-weight: bold }
.page { fill: #ffffff } .grid { stroke: #d1d9e0 } .spread { stroke: #1f2328 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .quiet { fill: #9198a1 } .page { fill: #0d1117 } .grid { stroke: #30363d }
.spread { stroke: #e6edf3 } }
</style>"""
_WIDTH, _LEFT, _ROW = 820, 190, 20
_OURS, _OTHERS = "#2f81f7", "#8b949e"
_COLORS = {"reference": "#d1572a", "batched": "#9a6bd1", "async-batcher": "#2da44e"}

Rounds = Mapping[str, Sequence[float]]  # figures by contender
Points = Mapping[str, Sequence[float]]  # by contender, one for each place on the x axis


def main() -> None:
    loads = _results("open_loop")["loads"]
    charts = [_lines(f"{name}, ms", list(loads), _by_load(loads, key)) for name, key in _LATENCIES]
    _write("open_loop", "Latency by load, as a share of the device's capacity (Poisson arrivals)", *charts)

    cases = _results("peers")["cases"]
    http = [name for name in cases if name.startswith("HTTP")]
    charts = [
        _bars(f"{case}, requests/s", _rounds(cases[case], "per_s")) for case in cases if case not in http
    ]
    _write("closed_loop", "Closed loop in one process", *charts)
    charts = [
        _bars(f"{case}, {unit}", _rounds(cases[case], key))
        for case in http
        for unit, key in (("requests/s", "per_s"), ("p99 in ms", "p99_ms"))
    ]
    _write("servers", "The same small endpoint over HTTP", *charts)

    models = _results("vit")["models"]
    charts = [_bars(f"{name}, images/s", of_one["rounds"]) for name, of_one in models.items()]
    _write("vit", "ViT-Ti/16 on CPU, 64 callers, from JPEG files unless it says otherwise", *charts)


_LATENCIES = (("p50", "p50_ms"), ("p99", "p99_ms"))


def _results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _by_load(loads: Mapping[str, Any], figure: str) -> Points:
    names = next(iter(loads.values()))["median"]
    return {name: [of_load["median"][name][figure] for of_load in loads.values()] for name in names}


def _rounds(case: Mapping[str, Any], figure: str) -> Rounds:
    return {name: [one[figure] for one in rounds] for name, rounds in case["rounds"].items()}


def _write(name: str, title: str, *charts: tuple[int, list[str]]) -> None:
    """Charts below each other, each with its height."""
    y, parts = 34, [f'<text class="title" x="12" y="22">{escape(title)}</text>']
    for height, drawn in charts:
        parts += [f'<g transform="translate(0 {y})">', *drawn, "</g>"]
        y += height
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + 8}">'
    page = f'<rect class="page" width="{_WIDTH}" height="{y + 8}"/>'
    (_DOCS / f"{name}.svg").write_text("\n".join([head, _STYLE, page, *parts, "</svg>"]) + "\n")


def _bars(title: str, rounds: Rounds) -> tuple[int, list[str]]:
    """A bar for each contender."""
    longest = max(max(values) for values in rounds.values())
    scale = (_WIDTH - _LEFT - 90) / longest
    parts = [f'<text class="quiet" x="12" y="14">{escape(title)}</text>']
    for row, (name, values) in enumerate(rounds.items()):
        y, middle = 22 + _ROW * row, sorted(values)[len(values) // 2]
        end, color = _LEFT + scale * middle, _OURS if name == "retinue" else _OTHERS
        low, high = _LEFT + scale * min(values), _LEFT + scale * max(values)
        parts += [
            f'<text x="{_LEFT - 8}" y="{y + 13}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{_LEFT}" y="{y + 2}" width="{end - _LEFT:.1f}" height="{_ROW - 5}" fill="{color}"/>',
            f'<line class="spread" x1="{low:.1f}" x2="{high:.1f}" y1="{y + 9.5}" y2="{y + 9.5}"/>',
            f'<text x="{max(end, high) + 6:.1f}" y="{y + 13}">{_short(middle)}</text>',
        ]
    return 34 + _ROW * len(rounds), parts


def _lines(title: str, places: Sequence[str], points: Points) -> tuple[int, list[str]]:
    """A line for each contender, on a logarithmic scale."""
    height, left, right = 230, 60, _WIDTH - 190
    values = [value for of_one in points.values() for value in of_one]
    low, high = math.log(min(values) / 1.2), math.log(max(values) * 1.2)

    def x(place: int) -> float:
        return left + 20 + (right - left - 40) * place / (len(places) - 1)

    def y(value: float) -> float:
        return 24 + (height - 54) * (high - math.log(value)) / (high - low)

    parts = [f'<text class="quiet" x="12" y="14">{escape(title)}</text>']
    for tick in _ticks(math.exp(low), math.exp(high)):
        at, label = y(tick), _short(tick)
        parts += [
            f'<line class="grid" x1="{left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>',
            f'<text class="quiet" x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{label}</text>',
        ]
    for place, name in enumerate(places):
        parts.append(
            f'<text class="quiet" x="{x(place):.0f}" y="{height - 12}" text-anchor="middle">{name}</text>'
        )
    for row, (name, of_one) in enumerate(points.items()):
        color = _OURS if name == "retinue" else _COLORS[name.split(",")[0]]
        dash = (
            ' stroke-dasharray="5 4"' if name.endswith(("5 ms", "10 ms")) else ""
        )  # what the documentation has
        style = f'fill="none" stroke="{color}" stroke-width="{3 if name == "retinue" else 1.5}"{dash}'
        path = " ".join(f"{x(place):.1f},{y(value):.1f}" for place, value in enumerate(of_one))
        key = 36 + _ROW * row
        parts += [
            f'<polyline points="{path}" {style}/>',
            f'<line x1="{right + 14}" x2="{right + 40}" y1="{key}" y2="{key}" {style}/>',
            f'<text x="{right + 46}" y="{key + 4}">{escape(name)}</text>',
        ]
    return height, parts


def _ticks(low: float, high: float) -> Iterator[float]:
    """1, 2, 5, 10, 20, and so on, between these."""
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high))):
        yield from (digit * 10.0**power for digit in (1, 2, 5) if low <= digit * 10.0**power <= high)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    main()
