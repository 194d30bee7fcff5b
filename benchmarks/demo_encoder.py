"""Images per second of the demo's encoder: shared batches against a plain loop and against one at a time.

    python -m benchmarks.demo_encoder [--rounds 9] [--callers 64] [--model FOLDER]

Contenders, on the same prepared pictures of mixed sizes, interleaved in rounds within one process:
    full batches    ``forward_batch`` in a plain loop, each call as full as ``max_batch_cost`` allows
    retinue         ``AsyncVisionEncoder``, so many closed-loop callers of one picture each
    one at a time   ``forward_batch`` in a plain loop, one picture a call
    from files      ``AsyncVisionEncoder`` again, decoding each picture's file as well
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.measure import interleaved, medians, save
from retinue import AsyncVisionEncoder, Preprocessed
from retinue.demo.encoder import DigitsEncoder
from retinue.demo.run import pictures

_TURNS = 12  # of each caller, in each round


class Prepared(DigitsEncoder):
    """The demo's encoder where the raws are already prepared: what is left is batching and the model."""

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

    def full_batches() -> float:
        return _per_second(wanted, lambda: [alone.forward_batch(batch) for batch in _full(items)])

    def one_at_a_time() -> float:
        return _per_second(wanted, lambda: [alone.forward_batch([item.item]) for item in items])

    async def compare() -> dict[str, list[float]]:
        async with AsyncVisionEncoder(Prepared(), options.model) as encoder:
            loop = asyncio.get_running_loop()

            def shared(of: Sequence[Any]) -> float:
                began = time.perf_counter()
                callers = asyncio.run_coroutine_threadsafe(_callers(encoder, of, options.callers), loop)
                callers.result()
                return float(wanted / (time.perf_counter() - began))

            return await asyncio.to_thread(
                interleaved,
                {
                    "full batches": full_batches,
                    "retinue": lambda: shared(items),
                    "one at a time": one_at_a_time,
                    "from files": lambda: shared(raws),
                },
                options.rounds,
            )

    figures = asyncio.run(compare())
    typical = medians(figures)
    for name, per_second in typical.items():
        print(f"{name:14} {per_second:7.0f} images/s")
    of_full = typical["retinue"] / typical["full batches"]
    of_one = typical["retinue"] / typical["one at a time"]
    print(f"retinue: {of_full:.2f} of full batches, {of_one:.2f}x one at a time")
    report = {"callers": options.callers, "median_images_per_s": typical, "rounds": figures}
    print("written to", save("demo_encoder", report, ("torch", "numpy", "pillow")))


def _full(items: Sequence[Preprocessed[Any]]) -> list[list[Any]]:
    """Batches in order, each as full as the limit allows."""
    batches: list[list[Any]] = [[]]
    room = DigitsEncoder.max_batch_cost
    for item in items:
        if item.cost > room:
            batches.append([])
            room = DigitsEncoder.max_batch_cost
        batches[-1].append(item.item)
        room -= item.cost
    return batches


def _per_second(images: int, work: Any) -> float:
    began = time.perf_counter()
    work()
    return images / (time.perf_counter() - began)


async def _callers(encoder: AsyncVisionEncoder[Any, Any, Any], raws: Sequence[Any], callers: int) -> None:
    """Each caller sends its share of ``raws``, one after the other."""

    async def caller(share: Sequence[Any]) -> None:
        for raw in share:
            await encoder.encode([raw])

    await asyncio.gather(*(caller(raws[number::callers]) for number in range(callers)))


if __name__ == "__main__":
    main()
