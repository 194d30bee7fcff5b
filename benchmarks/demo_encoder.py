"""Images per second of the demo's encoder: shared batches against a plain loop and against one at a time.

    python -m benchmarks.demo_encoder [--rounds 9] [--callers 64] [--model FOLDER]

Contenders, on the same prepared pictures of mixed sizes, interleaved in rounds within one process:
    full batches    ``forward_batch`` in a plain loop, 32 pictures a call
    one at a time   the same, one picture a call
    retinue         ``AsyncVisionEncoder``, so many closed-loop callers of one picture each, 32 a batch
    with the phase  the same, through a ``preprocess`` that has nothing left to do, batches bounded by cost
    from files      the same, decoding each picture's file in ``preprocess``
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.measure import interleaved, medians, save
from retinue import AsyncVisionEncoder, Preprocessed, VisionEncoderBackend
from retinue.demo.encoder import DigitsEncoder
from retinue.demo.run import pictures

_TURNS = 12  # of each caller, in each round
_FULL = 32  # pictures; about as many as ``max_batch_cost`` admits


class Items(VisionEncoderBackend[Any, Any, Any]):
    """The demo's encoder without a preprocess phase: its raws are its items."""

    max_batch_items = _FULL

    def build(self, model_id: str) -> None:
        self._digits = DigitsEncoder()
        self._digits.build(model_id)

    def forward_batch(self, items: list[Any], target_bucket: int | None = None) -> list[Any]:
        return self._digits.forward_batch(items)


class Prepared(DigitsEncoder):
    """The demo's encoder with a preprocess phase that has nothing left to do for what is prepared."""

    def preprocess(self, raw: Any) -> Preprocessed[Any]:
        return raw if isinstance(raw, Preprocessed) else super().preprocess(raw)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--callers", type=int, default=64)
    parser.add_argument("--model", default="demo", help="a checkpoint's folder; the shipped one by default")
    options = parser.parse_args()

    alone = Prepared()
    alone.build(options.model)
    files = [picture.data for picture in pictures()]
    wanted = options.callers * _TURNS
    raws = [files[index % len(files)] for index in range(wanted)]
    items = [alone.preprocess(raw) for raw in raws]

    bare = [image.item for image in items]

    def in_calls_of(size: int) -> float:
        began = time.perf_counter()
        for start in range(0, wanted, size):
            alone.forward_batch(bare[start : start + size])
        return float(wanted / (time.perf_counter() - began))

    async def compare() -> dict[str, list[float]]:
        plain = AsyncVisionEncoder(Items(), options.model)
        phased = AsyncVisionEncoder(Prepared(), options.model)
        async with plain, phased:
            loop = asyncio.get_running_loop()

            def shared(encoder: AsyncVisionEncoder[Any, Any, Any], of: Sequence[Any]) -> float:
                began = time.perf_counter()
                callers = asyncio.run_coroutine_threadsafe(_callers(encoder, of, options.callers), loop)
                callers.result()
                return float(wanted / (time.perf_counter() - began))

            return await asyncio.to_thread(
                interleaved,
                {
                    "full batches": lambda: in_calls_of(_FULL),
                    "one at a time": lambda: in_calls_of(1),
                    "retinue": lambda: shared(plain, bare),
                    "with the phase": lambda: shared(phased, items),
                    "from files": lambda: shared(phased, raws),
                },
                options.rounds,
            )

    figures = asyncio.run(compare())
    typical = medians(figures)
    for name, per_second in typical.items():
        print(f"{name:14} {per_second:7.0f} images/s")
    for name in ("retinue", "with the phase"):
        of_full = typical[name] / typical["full batches"]
        of_one = typical[name] / typical["one at a time"]
        print(f"{name}: {of_full:.2f} of full batches, {of_one:.2f}x one at a time")
    report = {"callers": options.callers, "median_images_per_s": typical, "rounds": figures}
    print("written to", save("demo_encoder", report, ("torch", "numpy", "pillow")))


async def _callers(encoder: AsyncVisionEncoder[Any, Any, Any], raws: Sequence[Any], callers: int) -> None:
    """Each caller sends its share of ``raws``, one after the other."""

    async def caller(share: Sequence[Any]) -> None:
        for raw in share:
            await encoder.encode([raw])

    await asyncio.gather(*(caller(raws[number::callers]) for number in range(callers)))


if __name__ == "__main__":
    main()
