"""A server of the chaos, as a process of its own: the demo's encoder with trouble, and vital signs.

    python -m tests.chaos.server --seed 1 --journal FILE [--upstream URL]

Behind the encoder is the embedded decoder, or a proxy to ``--upstream``. Beside the usual paths it has

    /chaos/vitals   what it holds: tasks, threads, memory
    /chaos/reached  answers when the picture ``tag`` has reached ``stage``; 404 if it takes too long
    /chaos/broken   POST: from now on every call fails; DELETE: no longer
    /chaos/order    POST: ``trouble`` goes wrong with the next call
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import logging
import sys
import threading
from collections import OrderedDict
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from retinue.decoders.transformers import TransformersDecoder
from retinue.demo.encoder import CHECKPOINT
from retinue.demo.serving import MODEL_NAME
from retinue.media import MediaPolicy
from retinue.server.embedded import EmbeddedApp
from retinue.server.limits import FailurePolicy, ServerLimits
from retinue.server.proxy import ProxyApp
from retinue.server.serving import serve
from retinue.server.stack import Behind, Stack

from .faults import Journal, Schedule, Troubled

LIMITS = ServerLimits(
    max_concurrent_requests=64,
    max_pending_cost=4096,
    max_pending_bytes=64 * 2**20,
    max_body_bytes=2 * 2**20,
    request_timeout_s=10.0,
    artifact_cache_bytes=2**20,  # soon full, so that what is kept does not look like a leak
)
MEDIA = MediaPolicy(
    max_image_bytes=2**20, max_images=8, fetch_timeout_s=3.0, max_redirects=3, allow_private_addresses=True
)
FAILURES = FailurePolicy(forward_timeout_s=4.0)
#: Shares of all calls.
RATES = {"raise": 0.02, "exit": 0.005, "short": 0.01, "memory": 0.01, "slow": 0.02}

_REACHED_S = 5.0
_REMEMBERED = 256  # stages of pictures that somebody may ask for


class Progress:
    """Which pictures have reached which stage: told by the encoder's threads, asked for on the event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reached: OrderedDict[tuple[str, str], asyncio.Event] = OrderedDict()
        self._loop: asyncio.AbstractEventLoop | None = None

    def reach(self, tag: str, stage: str) -> None:
        """Any thread: it is there."""
        with self._lock:
            event = self._event(tag, stage)
            if self._loop is None:  # nobody has ever waited
                event.set()
            else:
                self._loop.call_soon_threadsafe(event.set)

    async def reached(self, tag: str, stage: str) -> bool:
        """Whether it gets there in time."""
        with self._lock:
            event, self._loop = self._event(tag, stage), asyncio.get_running_loop()
        try:
            await asyncio.wait_for(event.wait(), _REACHED_S)
        except asyncio.TimeoutError:
            return False
        return True

    def _event(self, tag: str, stage: str) -> asyncio.Event:
        event = self._reached.setdefault((tag, stage), asyncio.Event())
        while len(self._reached) > _REMEMBERED:
            self._reached.popitem(last=False)
        return event


class Signs:
    """An ASGI app that answers what only the chaos asks, in front of ``app``."""

    def __init__(self, app: ASGIApp, backend: Troubled, progress: Progress) -> None:
        self._app = app
        self._backend = backend
        self._progress = progress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI interface."""
        if not scope["path"].startswith("/chaos/"):
            return await self._app(scope, receive, send)
        return await (await self._answer(Request(scope)))(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        path = request.url.path
        if path == "/chaos/reached":
            there = await self._progress.reached(request.query_params["tag"], request.query_params["stage"])
            return Response(status_code=200 if there else 404)
        if path == "/chaos/broken":
            broken = self._backend.broken
            (broken.set if request.method == "POST" else broken.clear)()
            return Response()
        if path == "/chaos/order":
            self._backend.orders.append(request.query_params["trouble"])
            return Response()
        return JSONResponse(_vitals())


def _vitals() -> dict[str, object]:
    """What this process holds, once all that nothing holds is given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    resident = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in line)
    return {
        "tasks": len(asyncio.all_tasks()),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "resident_bytes": int(resident.split()[1]) * 1024,
        "blocks": sys.getallocatedblocks(),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
    }


def _behind(upstream: str | None) -> Behind:
    if upstream is not None:
        proxy = ProxyApp(upstream)
        return Behind(proxy, close=proxy.aclose)
    decoder = TransformersDecoder(CHECKPOINT, dtype="float32", max_batch_items=32)
    app = EmbeddedApp(decoder, model_name=MODEL_NAME)
    return Behind(app, load=decoder.aload, close=decoder.aclose, takes_artifacts=True)


def main() -> int:
    """Serve until told to stop."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", required=True)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--upstream")
    options = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    progress = Progress()
    with options.journal.open("w", buffering=1) as lines:
        backend = Troubled(Schedule(options.seed, RATES), Journal(lines), progress.reach)
        stack = Stack(
            backend, "demo", _behind(options.upstream), limits=LIMITS, media=MEDIA, failures=FAILURES
        )
        stack.app = Signs(stack.app, backend, progress)
        return serve(stack, "chaos", host="127.0.0.1", port=0, grace_s=10.0)


if __name__ == "__main__":
    sys.exit(main())
