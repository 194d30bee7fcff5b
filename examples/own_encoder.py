"""An encoder of one's own: write one class, and dozens of concurrent requests share its batches.

Run it:  python examples/own_encoder.py

The class below takes pictures in a small file format (PGM), cuts them into patches of 8x8 pixels and gives
back the brightness of each: no neural network, so that the four methods can be seen. What is real is who
runs them: ``preprocess`` on several threads at once, everything else on one thread, and ``forward_batch`` on
the pictures of whichever requests wait at that moment.
"""

import asyncio
import random
import re
import time

from retinue import (
    AsyncVisionEncoder,
    BatchRecord,
    InvalidInput,
    Preprocessed,
    RequestRecord,
    VisionEncoderBackend,
)

PATCH = 8  # pixels on each side
Patches = list[bytes]  # the pixels of each patch
Artifact = list[float]  # the brightness of each patch, 0 to 1


class Brightness(VisionEncoderBackend[bytes, Patches, Artifact]):
    """From a PGM file to the brightness of its patches."""

    max_batch_cost = 256  # patches in one forward_batch: what the device has memory for
    max_batch_items = 32

    def build(self, model_id: str) -> None:
        print(f"building {model_id}")
        self.scale = 1 / 255

    def preprocess(self, raw: bytes) -> Preprocessed[Patches]:
        header = re.match(rb"P5\s+(\d+)\s+(\d+)\s+255\s", raw)
        if header is None:
            raise InvalidInput("not a PGM file")  # the caller reads this, and which of its pictures it was
        width, height, pixels = int(header[1]), int(header[2]), raw[header.end() :]
        if min(width, height) < PATCH or len(pixels) != width * height:
            raise InvalidInput(
                f"{len(pixels)} pixels for a picture of {width}x{height}, {PATCH}x{PATCH} at least"
            )
        patches = [
            b"".join(pixels[y * width + left :][:PATCH] for y in range(top, top + PATCH))
            for top in range(0, height - PATCH + 1, PATCH)
            for left in range(0, width - PATCH + 1, PATCH)
        ]
        return Preprocessed(patches, cost=len(patches))

    def forward_batch(self, items: list[Patches], target_bucket: int | None = None) -> list[Artifact]:
        time.sleep(0.005)  # a device takes its time for each call, however full it is
        return [[sum(patch) / len(patch) * self.scale for patch in patches] for patches in items]

    def close(self) -> None:
        print("closed")


class Watch:
    """An observer: hears of every batch and of every request as they end, on the thread where they end."""

    def __init__(self) -> None:
        self.batches: list[BatchRecord] = []

    def on_batch(self, record: BatchRecord) -> None:
        self.batches.append(record)

    def on_request(self, record: RequestRecord) -> None:
        pass


def grey(width: int, height: int, brightness: int) -> bytes:
    """A picture of one colour, as a PGM file."""
    return b"P5 %d %d 255\n" % (width, height) + bytes([brightness]) * (width * height)


async def main() -> None:
    sizes = random.Random(42)
    watch = Watch()
    async with AsyncVisionEncoder(Brightness(), "brightness-8", observer=watch) as encoder:

        async def request(number: int) -> int:
            """One caller: sends one to three pictures, gets as many artifacts, in order."""
            shades = [number * 3 + place for place in range(sizes.randint(1, 3))]
            pictures = [grey(sizes.choice([16, 24, 40]), sizes.choice([16, 32]), shade) for shade in shades]
            artifacts = await encoder.encode(pictures)
            assert [round(artifact[0] * 255) for artifact in artifacts] == shades
            return len(pictures)

        counts = await asyncio.gather(*(request(number) for number in range(48)))
        print(f"{len(counts)} requests, {sum(counts)} pictures: each got its own back")

        try:
            await encoder.encode([grey(16, 16, 0), b"GIF89a"])
        except InvalidInput as error:
            print(f"refused: {error}")

    for batch in watch.batches:
        print(
            f"batch {batch.id}: {batch.items:2} pictures of {batch.requests:2} requests, "
            f"{batch.cost:3} patches, {batch.duration_s * 1000:.1f} ms"
        )


if __name__ == "__main__":
    asyncio.run(main())
