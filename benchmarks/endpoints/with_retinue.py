"""Starlette, uvicorn, and ``ThreadedMicroBatcher`` with its defaults."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from benchmarks.device import CAP, Device
from retinue import ThreadedMicroBatcher

batcher = ThreadedMicroBatcher[int, int](Device(), max_batch_cost=CAP)


@asynccontextmanager
async def lifespan(_: Starlette) -> AsyncIterator[None]:
    """The batcher's life is the app's."""
    async with batcher:
        yield


async def echo(request: Request) -> JSONResponse:
    """One item, through the device."""
    return JSONResponse((await batcher.submit([await request.json()]))[0])


if __name__ == "__main__":
    app = Starlette(routes=[Route("/echo", echo, methods=["POST"])], lifespan=lifespan)
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning", access_log=False)
