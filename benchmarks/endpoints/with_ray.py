"""Ray Serve's ``@serve.batch``, as its guide to high throughput has it."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from typing import Any

os.environ |= {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1", "RAY_SERVE_ENABLE_HA_PROXY": "1"}

import ray
from ray import serve
from starlette.requests import Request

from benchmarks.device import CAP, Device

WAIT_S = float(sys.argv[2]) / 1e3


@serve.deployment(max_ongoing_requests=2 * CAP)
class Echo:
    """A batch through the device."""

    def __init__(self) -> None:
        self._device = Device()

    @serve.batch(max_batch_size=CAP, batch_wait_timeout_s=WAIT_S)  # type: ignore[untyped-decorator]  # see below
    async def _batch(self, items: list[int]) -> list[int]:
        return await asyncio.to_thread(self._device, items)

    async def __call__(self, request: Request) -> Any:
        """One item."""
        return await self._batch(await request.json())


if __name__ == "__main__":
    ray.init(include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    # Where Ray is not installed, its decorators have no types.
    serve.run(Echo.bind(), route_prefix="/echo")  # type: ignore[attr-defined]
    threading.Event().wait()
