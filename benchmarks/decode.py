"""Milliseconds to decode a 1080p photograph to 336 pixels: ``Image.decode`` against plain Pillow.

    python -m benchmarks.decode [--rounds 15] [--side 336]

Contenders, on the same JPEG of quality 90, interleaved in rounds within one process:
    plain    ``PIL.Image.open``, ``convert("RGB")``, ``resize`` with LANCZOS to the same size
    retinue  ``Image(data).decode(max_side=336)``, the check of the header included

Also prints how much the two pictures differ, as PSNR. The photograph is synthesised: noise whose amplitude
falls with the frequency to the power of 1.2, within the range of natural images, in three correlated
channels. Its file is of a photograph's usual size, about 3 bits a pixel; how fast it falls decides that, and
with it the ratio, for a reduced scale saves none of the entropy decoding.
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import PIL.Image

from benchmarks.measure import interleaved, medians, save
from retinue.media import Image

_SIZE = (1920, 1080)
_FALL = 1.2
_REPEATS = 5  # decodes in one figure


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--side", type=int, default=336)
    options = parser.parse_args()

    data = photograph()
    ours = Image(data).decode(max_side=options.side)
    plain = partial(_plain, data, ours.size)
    figures = interleaved(
        {
            "plain": lambda: _ms(plain),
            "retinue": lambda: _ms(lambda: Image(data).decode(max_side=options.side)),
        },
        options.rounds,
    )
    typical = medians(figures)
    ratio = typical["retinue"] / typical["plain"]
    psnr = _psnr(ours, plain())
    print(f"{len(data)} bytes of JPEG, {_SIZE[0]}x{_SIZE[1]} to {ours.size[0]}x{ours.size[1]}")
    for name, ms in typical.items():
        print(f"{name:8} {ms:6.2f} ms")
    print(f"retinue takes {ratio:.2f} of plain; PSNR {psnr:.1f} dB")
    report = {
        "median_ms": typical,
        "ratio": ratio,
        "psnr_db": psnr,
        "jpeg_bytes": len(data),
        "rounds": figures,
    }
    print("written to", save("decode", report, ("pillow",)))


def photograph() -> bytes:
    """A JPEG of quality 90 with a photograph's statistics."""
    generator = np.random.default_rng(7)
    width, height = _SIZE
    y, x = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None, :]
    falling = np.maximum(np.hypot(x, y), 1 / width) ** -_FALL
    noise = [np.fft.irfft2(np.fft.rfft2(generator.normal(size=(height, width))) * falling) for _ in range(4)]
    light, *tints = (band[:height, :width] / band.std() for band in noise)
    bands = [128 + 50 * light + 12 * tint for tint in tints]
    pixels = np.clip(np.stack(bands, axis=-1), 0, 255).astype(np.uint8)  # (height, width, 3)
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, "JPEG", quality=90)
    return file.getvalue()


def _plain(data: bytes, size: tuple[int, int]) -> PIL.Image.Image:
    with PIL.Image.open(io.BytesIO(data)) as image:
        return image.convert("RGB").resize(size, PIL.Image.Resampling.LANCZOS)


def _ms(decode: Callable[[], object]) -> float:
    began = time.perf_counter()
    for _ in range(_REPEATS):
        decode()
    return (time.perf_counter() - began) * 1000 / _REPEATS


def _psnr(one: PIL.Image.Image, other: PIL.Image.Image) -> float:
    first: npt.NDArray[np.float64] = np.asarray(one, dtype=np.float64)
    error = float(np.mean((first - np.asarray(other, dtype=np.float64)) ** 2))
    return float(10 * np.log10(255**2 / max(error, 1e-12)))


if __name__ == "__main__":
    main()
