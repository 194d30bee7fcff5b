"""Images per second of a real vision transformer on CPU, from JPEG files, at 64 closed-loop callers.

    python -m benchmarks.vit [--rounds 4] [--callers 64] [--peers .bench]

The model is ViT-Ti/16 (12 layers of width 192) with random weights, at 64 and at 224 px; torch has as many
threads as there are cores, and at 64 px then one. A raw is a JPEG file, a quarter wider and higher than the
model's input; ``preprocess`` decodes, resizes and normalizes it. Contenders, interleaved in rounds in one
process:
    full batches           a plain loop of calls of 32, over items that were prepared beforehand
    one at a time          the same, one item a call
    files, one loop        a plain loop from files: prepare 32, then call
    files, prepared ahead  the same, while a pool of a thread for each core prepares the files to come
    retinue, prepared      ``AsyncVisionEncoder`` over prepared items, without a preprocess phase, 32 a call
    retinue                the same from files
    the peers              of ``in_process``, from files, 32 a call, behind such a pool

A plain loop has a fresh thread, as an encoder has: one that once called torch keeps threads of torch's own,
and these slow down the threads of another.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import PIL.Image
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.in_process import PEERS, Contender, contenders
from benchmarks.measure import interleaved, medians, save
from retinue import AsyncVisionEncoder, Preprocessed, VisionEncoderBackend

_WIDTH, _HEADS, _LAYERS, _PATCH = 192, 3, 12, 16
_FULL = 32  # items of a call
_PLAIN = 8 * _FULL  # items of a plain loop, at most
_PEERS = (
    "reference",
    "batched, 5 ms",
    "async-batcher, 10 ms",
)  # those waits did better here than shorter ones
_TURNS = {64: 8, 224: 1}  # of each caller in a round, by the model's input
_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


T = TypeVar("T")


class Block(nn.Module):
    """Attention, then a perceptron, each added to what it read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.qkv, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.mlp = nn.Sequential(nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH))

    def forward(self, rows: Tensor) -> Tensor:
        """(items, tokens, width) to the same."""
        qkv = self.qkv(self.norm1(rows)).unflatten(-1, (3, _HEADS, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each (items, heads, tokens, width / heads)
        attended = functional.scaled_dot_product_attention(query, key, value)
        rows = rows + self.out(attended.transpose(1, 2).flatten(2))
        return rows + self.mlp(self.norm2(rows))  # type: ignore[no-any-return]


class ViT(nn.Module):
    """A vision transformer without a head."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, _WIDTH, _PATCH, _PATCH)
        self.first = nn.Parameter(torch.randn(1, 1, _WIDTH))
        self.positions = nn.Parameter(torch.randn(1, (side // _PATCH) ** 2 + 1, _WIDTH) * 0.02)
        self.blocks = nn.Sequential(*(Block() for _ in range(_LAYERS)), nn.LayerNorm(_WIDTH))

    def forward(self, pixels: Tensor) -> Tensor:
        """(items, 3, side, side) to (items, tokens, width)."""
        rows = self.patches(pixels).flatten(2).transpose(1, 2)
        rows = torch.cat((self.first.expand(len(rows), -1, -1), rows), dim=1)
        return self.blocks(rows + self.positions)  # type: ignore[no-any-return]


class Backend(VisionEncoderBackend[bytes, Tensor, Tensor]):
    """JPEG files of any size to rows."""

    max_batch_items = _FULL
    hidden_size = _WIDTH

    def __init__(self, side: int) -> None:
        self._side = side

    def build(self, model_id: str) -> None:
        torch.manual_seed(0)
        self._vit = ViT(self._side).eval()

    def preprocess(self, raw: bytes) -> Preprocessed[Tensor]:
        with PIL.Image.open(io.BytesIO(raw)) as file:
            picture = file.convert("RGB").resize((self._side, self._side), PIL.Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)  # (3, side, side) uint8
        return Preprocessed((pixels.float() - 127.5) / 64)

    @torch.inference_mode()
    def forward_batch(self, items: list[Tensor], target_bucket: int | None = None) -> list[Tensor]:
        return [rows.clone() for rows in self._vit(torch.stack(items))]  # each (tokens, width)


class Prepared(VisionEncoderBackend[Tensor, Tensor, Tensor]):
    """The same without a preprocess phase: its raws are its items."""

    max_batch_items = _FULL
    hidden_size = _WIDTH

    def __init__(self, side: int) -> None:
        self._backend = Backend(side)

    def build(self, model_id: str) -> None:
        self._backend.build(model_id)

    def forward_batch(self, items: list[Tensor], target_bucket: int | None = None) -> list[Tensor]:
        return self._backend.forward_batch(items)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--callers", type=int, default=64)
    parser.add_argument("--peers", type=Path, default=PEERS, help="folder with the peers' packages")
    options = parser.parse_args()
    known, report = contenders(options.peers), {}
    peers = {name: known[name] for name in _PEERS}
    for side, threads in ((64, _CORES), (64, 1), (224, _CORES)):
        torch.set_num_threads(threads)
        case = f"{side} px, {threads} thread{'s' if threads > 1 else ''} in torch"
        print(case)
        work = _on_a_thread(partial(Work, side, options.callers))
        report[case] = work.compare(peers, options.rounds)
    packages = ("torch", "numpy", "pillow", "ai-dynamo", "batched", "async-batcher")
    print("written to", save("vit", {"callers": options.callers, "models": report}, packages))


class Work:
    """The files of a round, and the ways to encode them; each returns images per second."""

    def __init__(self, side: int, callers: int) -> None:
        self._side, self._callers = side, callers
        self._backend = Backend(side)
        self._backend.build("random")
        self._raws = [_jpeg(side * 5 // 4, seed) for seed in range(callers * _TURNS[side])]
        self._items = [self._prepared(raw) for raw in self._raws]
        self._plain = self._raws[:_PLAIN]

    def compare(self, peers: dict[str, Contender], rounds: int) -> dict[str, Any]:
        """Run all of them; print and return medians and rounds."""
        figures = interleaved(
            {
                "full batches": partial(_on_a_thread, lambda: self._full_batches(self._items[:_PLAIN])),
                "one at a time": partial(_on_a_thread, self._one_at_a_time),
                "files, one loop": partial(_on_a_thread, self._one_loop),
                "files, prepared ahead": partial(_on_a_thread, self._prepared_ahead),
                "retinue, prepared": lambda: asyncio.run(self._retinue(Prepared(self._side), self._items)),
                "retinue": lambda: asyncio.run(self._retinue(self._backend, self._raws)),
                **{
                    name: partial(lambda peer: asyncio.run(self._peer(peer)), peer)
                    for name, peer in peers.items()
                },
            },
            rounds,
        )
        typical = medians(figures)
        for name, figure in typical.items():
            print(
                f"  {name:22} {figure:7.1f} images/s, {figure / typical['full batches']:.2f} of full batches"
            )
        return {"median_images_per_s": typical, "rounds": figures}

    def _prepared(self, raw: bytes) -> Tensor:
        return self._backend.preprocess(raw).item

    def _full_batches(self, items: Iterable[Tensor]) -> float:
        began_s, rest = time.perf_counter(), iter(items)
        while batch := list(islice(rest, _FULL)):
            self._backend.forward_batch(batch)
        return len(self._plain) / (time.perf_counter() - began_s)

    def _one_at_a_time(self) -> float:
        began_s, some = time.perf_counter(), self._items[:_FULL]
        for item in some:
            self._backend.forward_batch([item])
        return len(some) / (time.perf_counter() - began_s)

    def _one_loop(self) -> float:
        return self._full_batches(map(self._prepared, self._plain))

    def _prepared_ahead(self) -> float:
        with ThreadPoolExecutor(_CORES) as pool:
            return self._full_batches(pool.map(self._prepared, self._plain))

    async def _retinue(self, backend: VisionEncoderBackend[Any, Any, Any], raws: Sequence[Any]) -> float:
        async with AsyncVisionEncoder(backend, "random") as encoder:
            return await self._closed_loop(lambda raw: encoder.encode([raw]), raws)

    async def _peer(self, peer: Contender) -> float:
        loop = asyncio.get_running_loop()

        async def encode(raw: bytes) -> Any:
            return await submit(await loop.run_in_executor(pool, self._prepared, raw))

        with ThreadPoolExecutor(_CORES) as pool:
            async with peer(self._backend.forward_batch, _FULL) as submit:
                return await self._closed_loop(encode, self._raws)

    async def _closed_loop(self, encode: Callable[[Any], Awaitable[Any]], raws: Sequence[Any]) -> float:
        """Each caller sends its share of ``raws``, one after the other, after a call that does not count."""

        async def caller(share: Sequence[Any]) -> None:
            for raw in share:
                await encode(raw)

        async def all_callers(raws: Sequence[Any]) -> None:
            await asyncio.gather(*(caller(raws[number :: self._callers]) for number in range(self._callers)))

        await all_callers(raws[:_FULL])
        began_s = time.perf_counter()
        await all_callers(raws)
        return len(raws) / (time.perf_counter() - began_s)


def _on_a_thread(work: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


def _jpeg(side: int, seed: int) -> bytes:
    """A picture with the detail of a photograph."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (side // 12 + 2, side // 12 + 2, 3), np.uint8)
    smooth = PIL.Image.fromarray(coarse).resize((side, side), PIL.Image.Resampling.BICUBIC)
    grain = rng.integers(-6, 7, (side, side, 3))
    file = io.BytesIO()
    picture = PIL.Image.fromarray(np.clip(np.asarray(smooth, np.int16) + grain, 0, 255).astype(np.uint8))
    picture.save(file, "JPEG", quality=85)
    return file.getvalue()


if __name__ == "__main__":
    main()
