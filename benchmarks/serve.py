"""What serving over HTTP costs: the event loop's time, health under heavy uploads, the demo's throughput.

    python -m benchmarks.serve [--rounds 7]

``loop``     CPU time that the server's event-loop thread spends on a request with a 100 KB JPEG, with an
             encoder and an app behind that answer at once; and the same app without the middleware.
``health``   latency of /health while twenty 12-megapixel JPEGs arrive and are decoded.
``demo``     images per second of the demo model at 64 clients, over HTTP and through the library.

The clients are a process of their own, whose requests are made beforehand.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import numpy as np
import PIL.Image
import torch
import uvloop
from starlette.types import Receive, Scope, Send

from benchmarks.measure import interleaved, medians, save
from retinue import AsyncVisionEncoder, Preprocessed, VisionEncoderBackend
from retinue.decoders.transformers import GenerationOptions, TransformersDecoder
from retinue.demo.encoder import CHECKPOINT, DigitsEncoder
from retinue.demo.prompt import QUESTION
from retinue.demo.run import Picture, pictures
from retinue.demo.serving import demo_stack
from retinue.media import Image
from retinue.server.limits import ServerLimits
from retinue.server.serving import listening
from retinue.server.stack import Behind, Stack

_CLIENTS = 64
_TURNS = 6  # of each client, in each round
_NO_CACHE = ServerLimits(artifact_cache_bytes=0)  # the same pictures come again and again


class Instant(VisionEncoderBackend[Image, Any, torch.Tensor]):
    """Returns the same rows at once."""

    max_batch_cost = 4096

    def build(self, model_id: str) -> None:
        self._rows = torch.zeros(16, 128)

    def preprocess(self, raw: Image) -> Preprocessed[Any]:
        return Preprocessed(None)

    def forward_batch(self, items: Sequence[Any], target_bucket: int | None = None) -> list[torch.Tensor]:
        return [self._rows.clone() for _ in items]


class Decoding(Instant):
    """Decodes every picture whole, and then returns at once."""

    def preprocess(self, raw: Image) -> Preprocessed[Any]:
        raw.decode()
        return Preprocessed(None)


async def instant(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers when it has read its request."""
    while (await receive()).get("more_body", False):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"{}"})


class Bare(Stack):
    """The same app with nothing in front of it."""

    def __init__(self) -> None:
        super().__init__(Instant(), "none", Behind(instant), limits=_NO_CACHE)
        self.app = instant


class OnAThread:
    """Something that lives on an event loop of its own, which is uvloop's, as the server's is."""

    def __init__(self) -> None:
        self._started, self._stop = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._run()))
        self._thread.start()
        self._started.wait()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with self._life():
            self._started.set()
            await self._stop.wait()

    def _life(self) -> AbstractAsyncContextManager[None]:
        raise NotImplementedError

    def stop(self) -> None:
        """End it."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


class Served(OnAThread):
    """A stack behind a socket."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        super().__init__()

    @asynccontextmanager
    async def _life(self) -> AsyncIterator[None]:
        async with listening(self._stack) as self.url:
            yield

    def cpu_s(self) -> float:
        """CPU time of the event loop's thread so far."""

        async def now() -> float:
            return time.thread_time()

        return asyncio.run_coroutine_threadsafe(now(), self._loop).result()


def jpeg(width: int, height: int, quality: int) -> bytes:
    """A picture with the detail of a photograph."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (height // 24 + 2, width // 24 + 2, 3), np.uint8)
    smooth = PIL.Image.fromarray(coarse).resize((width, height), PIL.Image.Resampling.BICUBIC)
    grain = rng.integers(-6, 7, (height, width, 3))
    file = io.BytesIO()
    picture = PIL.Image.fromarray(np.clip(np.asarray(smooth, np.int16) + grain, 0, 255).astype(np.uint8))
    picture.save(file, "JPEG", quality=quality)
    return file.getvalue()


def chat(images: Sequence[bytes], model: str = "demo") -> str:
    """The body of a request about ``images``."""
    parts: list[Any] = [
        {"type": "image_url", "image_url": {"url": f"data:;base64,{base64.b64encode(image).decode()}"}}
        for image in images
    ]
    content = [*parts, {"type": "text", "text": QUESTION}]
    message = {"role": "user", "content": content}
    return json.dumps({"model": model, "messages": [message], "max_tokens": 8, "temperature": 0})


class Load:
    """Clients in a process of their own."""

    def __init__(self, url: str, bodies: Sequence[str], clients: int) -> None:
        command = [sys.executable, "-m", "benchmarks.load", url, str(clients)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(list(bodies)) + "\n")

    def run(self, turns: int) -> float:
        """Seconds that ``turns`` requests of each client took, all at once."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{turns}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def stop(self) -> None:
        """End it."""
        self._process.communicate()


def loop_time(rounds: int) -> dict[str, Any]:
    """Microseconds of the event loop's CPU time for a request with a 100 KB JPEG."""
    image = jpeg(640, 480, 92)
    served = {
        "with the middleware": Served(Stack(Instant(), "none", Behind(instant), limits=_NO_CACHE)),
        "without": Served(Bare()),
    }
    loads = {name: Load(server.url, [chat([image])], 16) for name, server in served.items()}

    def us(name: str) -> float:
        began_s = served[name].cpu_s()
        loads[name].run(25)
        return (served[name].cpu_s() - began_s) / (16 * 25) * 1e6

    figures = interleaved({name: lambda name=name: us(name) for name in served}, rounds)  # type: ignore[misc]
    for load in loads.values():
        load.stop()
    for server in served.values():
        server.stop()
    return {"jpeg_bytes": len(image), "median_us": medians(figures), "rounds": figures}


def health_latency() -> dict[str, Any]:
    """Milliseconds that /health takes while twenty 12-megapixel JPEGs arrive."""
    served = Served(Stack(Decoding(), "none", Behind(instant), limits=_NO_CACHE))
    image = jpeg(4000, 3000, 90)
    load = Load(served.url, [chat([image])], 20)
    done = threading.Event()

    def work() -> None:
        load.run(2)
        done.set()

    async def ask() -> list[float]:
        host, port = served.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        latencies = []
        while not done.is_set():
            began_s = time.perf_counter()
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b'{"status":"ok"}')
            latencies.append((time.perf_counter() - began_s) * 1e3)
            await asyncio.sleep(0.005)
        writer.close()
        await writer.wait_closed()
        return latencies

    working = threading.Thread(target=work)
    working.start()
    latencies = sorted(asyncio.run(ask()))
    working.join()
    load.stop()
    served.stop()
    p99 = latencies[int(0.99 * (len(latencies) - 1))]
    return {
        "jpeg_bytes": len(image),
        "samples": len(latencies),
        "median_ms": statistics.median(latencies),
        "p99_ms": p99,
        "max_ms": latencies[-1],
    }


class Library(OnAThread):
    """The demo model without HTTP."""

    @asynccontextmanager
    async def _life(self) -> AsyncIterator[None]:
        encoder = AsyncVisionEncoder(DigitsEncoder(), "demo")
        decoder = TransformersDecoder(CHECKPOINT, dtype="float32", max_batch_items=32)
        async with encoder as self._encoder, decoder as self._decoder:
            yield

    async def _ask(self, shown: Picture) -> None:
        artifacts = await self._encoder.encode([shown.data])
        parts = [{"type": "prompt_embeds", "data": artifact} for artifact in artifacts]
        content = [*parts, {"type": "text", "text": QUESTION}]
        prompt = await asyncio.to_thread(self._decoder.chat_prompt, [{"role": "user", "content": content}])
        await self._decoder.generate(prompt, GenerationOptions(max_new_tokens=8))

    def run(self, shown: Sequence[Picture], clients: int, turns: int) -> float:
        """Seconds that ``turns`` requests of each client took, all at once."""

        async def client(number: int) -> None:
            for turn in range(turns):
                await self._ask(shown[(number + turn * clients) % len(shown)])

        async def all_clients() -> float:
            began_s = time.perf_counter()
            await asyncio.gather(*(client(number) for number in range(clients)))
            return time.perf_counter() - began_s

        return asyncio.run_coroutine_threadsafe(all_clients(), self._loop).result()


def demo_throughput(rounds: int) -> dict[str, Any]:
    """Images per second of the demo model, over HTTP and through the library."""
    album = pictures()
    served, library = Served(demo_stack(limits=_NO_CACHE)), Library()
    load = Load(served.url, [chat([picture.data]) for picture in album], _CLIENTS)
    count = _CLIENTS * _TURNS
    figures = interleaved(
        {
            "over HTTP": lambda: count / load.run(_TURNS),
            "library": lambda: count / library.run(album, _CLIENTS, _TURNS),
        },
        rounds,
    )
    load.stop()
    library.stop()
    served.stop()
    return {"clients": _CLIENTS, "median_images_per_s": medians(figures), "rounds": figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    loop = loop_time(options.rounds)
    for name, us in loop["median_us"].items():
        print(f"event loop, {name}: {us:.0f} us of CPU a request ({loop['jpeg_bytes'] / 1e3:.0f} KB JPEG)")
    health = health_latency()
    print(
        f"/health while twenty {health['jpeg_bytes'] / 1e6:.1f} MB JPEGs arrive: "
        f"median {health['median_ms']:.1f} ms, p99 {health['p99_ms']:.1f} ms, "
        f"max {health['max_ms']:.1f} ms ({health['samples']} samples)"
    )
    demo = demo_throughput(options.rounds)
    typical = demo["median_images_per_s"]
    for name, per_second in typical.items():
        print(f"demo model, {name}: {per_second:.0f} images/s")
    print(f"over HTTP: {typical['over HTTP'] / typical['library']:.2f} of the library")
    packages = ("torch", "uvicorn", "starlette", "aiohttp", "orjson", "pybase64")
    print("written to", save("serve", {"loop": loop, "health": health, "demo": demo}, packages))


if __name__ == "__main__":
    main()
