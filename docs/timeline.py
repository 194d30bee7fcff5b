"""Draws docs/timeline.svg from a real run: ``python docs/timeline.py``.

Two dozen requests of one to three items arrive at random; ``fn`` takes 4 ms and 0.4 ms more for each unit of
cost, as a small encoder might. A line is a request: pale while it waits, dark while its batch runs.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from retinue import BatchRecord, RequestRecord, ThreadedMicroBatcher

_WIDTH, _LEFT, _TOP, _ROW = 860, 70, 74, 13
_COLORS = ("#2f6f9f", "#b3541e")  # of odd and of even batches


@dataclass(frozen=True)
class _Request:
    came_s: float
    record: RequestRecord


class _Recorder:
    """Keeps all records; the batcher's thread and the event loop both write."""

    def __init__(self) -> None:
        self.began_s = time.monotonic()
        self.batches: dict[int, tuple[float, BatchRecord]] = {}
        self.requests: list[_Request] = []
        self._lock = threading.Lock()

    def on_batch(self, record: BatchRecord) -> None:
        with self._lock:
            self.batches[record.id] = (time.monotonic() - self.began_s - record.duration_s, record)

    def on_request(self, record: RequestRecord) -> None:
        with self._lock:
            self.requests.append(_Request(time.monotonic() - self.began_s - record.total_s, record))


async def record() -> _Recorder:
    """Run the requests."""
    rng = random.Random(7)
    recorder = _Recorder()

    def fn(costs: list[int]) -> list[int]:
        time.sleep(0.004 + 0.0004 * sum(costs))
        return costs

    batcher = ThreadedMicroBatcher[int, int](fn, max_batch_cost=24, observer=recorder)
    async with batcher:

        async def request(at_s: float) -> None:
            await asyncio.sleep(at_s)
            costs = [rng.randint(2, 6) for _ in range(rng.randint(1, 3))]
            await batcher.submit(costs, costs)

        await asyncio.gather(*(request(rng.uniform(0, 0.07)) for _ in range(26)))
    return recorder


def draw(recorder: _Recorder) -> str:
    """The run as an SVG picture."""
    requests = sorted(recorder.requests, key=lambda request: request.came_s)
    end_s = max(began_s + batch.duration_s for began_s, batch in recorder.batches.values())
    scale = (_WIDTH - _LEFT - 20) / end_s
    height = _TOP + _ROW * len(requests) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        '<text x="8" y="20" font-size="13">Each line is a request: pale while it waits, dark while it runs. '
        "Each block is one call, with its items and their cost (cap 24).</text>",
        f'<text x="8" y="{_TOP - 22}">calls</text>',
        f'<text x="8" y="{_TOP + 12}">requests</text>',
    ]

    def x(second: float) -> float:
        return _LEFT + scale * second

    for number, (began_s, batch) in sorted(recorder.batches.items()):
        color = _COLORS[number % 2]
        width = scale * batch.duration_s
        parts.append(
            f'<rect x="{x(began_s):.1f}" y="{_TOP - 40}" width="{width:.1f}" height="30" fill="{color}"/>'
            f'<text x="{x(began_s) + width / 2:.1f}" y="{_TOP - 27}" fill="white" text-anchor="middle">'
            f"{batch.items}</text>"
            f'<text x="{x(began_s) + width / 2:.1f}" y="{_TOP - 14}" fill="white" text-anchor="middle" '
            f'font-size="10">{batch.cost}</text>'
        )
    for row, request in enumerate(requests):
        y = _TOP + _ROW * row + 4
        ended = request.came_s + request.record.total_s
        parts.append(
            f'<rect x="{x(request.came_s):.1f}" y="{y}" width="{scale * (ended - request.came_s):.1f}" '
            'height="7" rx="3" fill="#d9dde2"/>'
        )
        for number in request.record.batches:
            began_s, batch = recorder.batches[number]
            parts.append(
                f'<rect x="{x(began_s):.1f}" y="{y}" width="{scale * batch.duration_s:.1f}" height="7" '
                f'fill="{_COLORS[number % 2]}"/>'
            )
    for tick_ms in range(0, int(end_s * 1000) + 1, 20):
        parts.append(
            f'<text x="{x(tick_ms / 1000):.1f}" y="{height - 10}" text-anchor="middle" fill="#555">'
            f"{tick_ms} ms</text>"
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    (Path(__file__).parent / "timeline.svg").write_text(draw(asyncio.run(record())))
