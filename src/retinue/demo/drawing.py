"""Draws the pictures that the demo model learns from, and those that the demo shows.

Digits come from fonts (matplotlib's for training; Pillow's own is held out and never learnt from) and
from the *Optical Recognition of Handwritten Digits* data set, as scikit-learn ships it (a fifth of it is held
out). Each is inked in a named color on dark or light paper, anywhere in a picture of almost any size.

``python -m retinue.demo.drawing OUT`` draws the pictures folder.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from retinue.demo.prompt import Label

__all__ = ["Glyphs", "draw", "font_glyphs", "handwritten_glyphs", "held_out_font_glyphs"]

#: Draws some digit, about as high as told (px): the digit, and its ink as an "L" image.
Glyphs = Callable[[random.Random, float], tuple[int, Image.Image]]

_Color = tuple[int, int, int]
_INKS: dict[str, _Color] = {
    "red": (220, 40, 40),
    "green": (30, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (230, 200, 30),
    "purple": (150, 50, 190),
    "white": (245, 245, 245),
    "black": (20, 20, 20),
}
_ON_DARK = ("red", "green", "blue", "yellow", "purple", "white")
_ON_LIGHT = ("red", "green", "blue", "purple", "black")
_LIGHT_SHARE = 0.35

_TRAINING_FONTS = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSans-Oblique",
    "DejaVuSansMono",
    "DejaVuSansMono-Bold",
    "DejaVuSerif",
    "DejaVuSerif-Bold",
    "STIXGeneral",
    "STIXGeneralBol",
)


def font_glyphs() -> Glyphs:
    """Digits in the fonts that matplotlib brings along, a little turned at times."""
    import matplotlib

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"

    @cache
    def font(name: str, size: int) -> ImageFont.FreeTypeFont:
        return ImageFont.truetype(folder / f"{name}.ttf", size)

    def glyph(rng: random.Random, height: float) -> tuple[int, Image.Image]:
        digit = rng.randrange(10)
        ink = _ink(digit, font(rng.choice(_TRAINING_FONTS), _font_size(height)))
        if rng.random() < 0.3:
            ink = ink.rotate(rng.uniform(-10, 10), Image.Resampling.BICUBIC, expand=True)
        return digit, ink

    return glyph


def held_out_font_glyphs() -> Glyphs:
    """Digits in Pillow's own font."""

    @cache
    def font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
        return ImageFont.load_default(size)

    def glyph(rng: random.Random, height: float) -> tuple[int, Image.Image]:
        digit = rng.randrange(10)
        return digit, _ink(digit, font(_font_size(height)))

    return glyph


def handwritten_glyphs(*, held_out: bool) -> Glyphs:
    """Handwritten digits; those of the training are bent, and their strokes made thinner or fatter."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.RandomState(0).permutation(len(data.target))
    chosen = order[1437:] if held_out else order[:1437]
    strokes = [Image.fromarray((data.images[i] * (255 / 16)).astype(np.uint8)) for i in chosen]  # 8x8 px each
    digits = [int(data.target[i]) for i in chosen]

    def glyph(rng: random.Random, height: float) -> tuple[int, Image.Image]:
        i = rng.randrange(len(digits))
        side = max(8, round(height))
        ink = strokes[i].resize((side, side), Image.Resampling.BICUBIC)
        return digits[i], ink if held_out else _bend(rng, ink)

    return glyph


def _font_size(height: float) -> int:
    return max(10, round(height / 0.73))  # a digit is about 0.73 of its font's size


def _ink(digit: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> Image.Image:
    """One digit, cut out at its bounds."""
    left, top, right, bottom = (round(edge) for edge in font.getbbox(str(digit)))
    ink = Image.new("L", (right - left, bottom - top))
    ImageDraw.Draw(ink).text((-left, -top), str(digit), font=font, fill=255)
    return ink


def _bend(rng: random.Random, ink: Image.Image) -> Image.Image:
    """Pull a 3x3 net over a square picture out of shape, turn it, and change its strokes' strength."""
    side = ink.width
    angle, spread = math.radians(rng.uniform(-13, 13)), 0.055 * side

    def node(column: int, row: int) -> tuple[float, float]:
        x, y = (column - 1) * side / 2, (row - 1) * side / 2
        turned = x * math.cos(angle) - y * math.sin(angle), x * math.sin(angle) + y * math.cos(angle)
        return side / 2 + turned[0] + rng.gauss(0, spread), side / 2 + turned[1] + rng.gauss(0, spread)

    net = [[node(column, row) for column in range(3)] for row in range(3)]
    half = side // 2
    edges = (0, half, side)
    mesh = [
        (
            (edges[column], edges[row], edges[column + 1], edges[row + 1]),
            (*net[row][column], *net[row + 1][column], *net[row + 1][column + 1], *net[row][column + 1]),
        )
        for row in range(2)
        for column in range(2)
    ]
    bent = ink.transform((side, side), Image.Transform.MESH, mesh, Image.Resampling.BICUBIC)
    power = rng.uniform(0.6, 1.5)
    return bent.point([round(255 * (value / 255) ** power) for value in range(256)])


def draw(rng: random.Random, glyphs: Glyphs, size: tuple[int, int]) -> tuple[Image.Image, Label]:
    """One digit somewhere in a picture of ``size`` (width, height) px."""
    room = min(size)
    smallest = max(0.55 * room, min(14, 0.9 * room))
    digit, ink = glyphs(rng, rng.uniform(smallest, 0.98 * room))
    ink.thumbnail(size)
    color, shade, paper = _palette(rng)
    picture = Image.new("RGB", size, paper)
    place = rng.randint(0, size[0] - ink.width), rng.randint(0, size[1] - ink.height)
    picture.paste(shade, (*place, place[0] + ink.width, place[1] + ink.height), ink)
    if rng.random() < 0.5:
        picture = _grain(rng, picture)
    return picture, Label(digit, color)


def _palette(rng: random.Random) -> tuple[str, _Color, _Color]:
    """The name of an ink, its shade and the color of the paper."""
    light = rng.random() < _LIGHT_SHARE
    color = rng.choice(_ON_LIGHT if light else _ON_DARK)
    grey = rng.randint(205, 255) if light else rng.randint(0, 90)
    return color, _near(rng, _INKS[color], 18), _near(rng, (grey, grey, grey), 12)


def _near(rng: random.Random, color: _Color, distance: int) -> _Color:
    red, green, blue = (min(255, max(0, value + rng.randint(-distance, distance))) for value in color)
    return red, green, blue


def _grain(rng: random.Random, picture: Image.Image) -> Image.Image:
    pixels = np.asarray(picture, np.int16)
    noise = np.random.default_rng(rng.getrandbits(32)).integers(-14, 15, pixels.shape)
    return Image.fromarray(np.clip(pixels + noise, 0, 255).astype(np.uint8))


def write_pictures(out: Path, count: int, seed: int) -> None:
    """Write ``count`` pictures of what was held out, and of fonts that were not, of many sizes and formats.

    Each name begins with the digit that the picture shows. Every digit is drawn equally often.
    """
    kinds = {
        "handwritten": handwritten_glyphs(held_out=True),
        "rendered": font_glyphs(),
        "held-out-font": held_out_font_glyphs(),
    }
    formats = ("png", "jpg", "webp")
    rng = random.Random(seed)
    out.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        kind = list(kinds)[number % len(kinds)]
        suffix = formats[number // len(kinds) % len(formats)]
        short = round(math.exp(rng.uniform(math.log(18), math.log(72 if suffix == "png" else 360))))
        long = round(short * rng.choice((1, 1, 1.3, 1.8)))
        size = (short, long) if rng.random() < 0.5 else (long, short)
        while True:
            picture, label = draw(rng, kinds[kind], size)
            if label.digit == number % 10:
                break
        picture.save(out / f"{label.digit}-{kind}-{number:02}.{suffix}", quality=90)  # PNG has no such thing


if __name__ == "__main__":
    write_pictures(Path(sys.argv[1]), count=48, seed=20)
