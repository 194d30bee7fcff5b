"""Draws the pictures that the demo model learns from, and those that the demo shows.

Digits come from fonts (some from packages for training; Pillow's own is held out and never learnt from) and
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
from importlib import resources
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont, ImageOps

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

#: Files of fonts, by the package that brings them and the folder therein.
_TRAINING_FONTS = {
    ("matplotlib", "mpl-data/fonts/ttf"): (
        "DejaVuSans.ttf",
        "DejaVuSans-Bold.ttf",
        "DejaVuSans-BoldOblique.ttf",
        "DejaVuSans-Oblique.ttf",
        "DejaVuSansMono.ttf",
        "DejaVuSansMono-Bold.ttf",
        "DejaVuSerif.ttf",
        "DejaVuSerif-Bold.ttf",
        "DejaVuSerif-Italic.ttf",
        "STIXGeneral.ttf",
        "STIXGeneralBol.ttf",
        "STIXGeneralItalic.ttf",
        "cmb10.ttf",
        "cmr10.ttf",
        "cmss10.ttf",
        "cmtt10.ttf",
    ),
    ("font_caladea", "files"): ("Caladea-Regular.ttf", "Caladea-Bold.ttf", "Caladea-Italic.ttf"),
    ("font_fredoka_one", "files"): ("FredokaOne-Regular.ttf",),
    ("font_hanken_grotesk", "files"): (
        "HankenGrotesk-Light.otf",
        "HankenGrotesk-Regular.otf",
        "HankenGrotesk-Italic.otf",
        "HankenGrotesk-SemiBold.otf",
        "HankenGrotesk-Bold.otf",
    ),
    ("font_manrope", "files"): (
        "Manrope-Light.ttf",
        "Manrope-Regular.ttf",
        "Manrope-SemiBold.ttf",
        "Manrope-ExtraBold.ttf",
    ),
}


def font_glyphs(*, bent: bool) -> Glyphs:
    """Digits in the fonts of the training; ``bent`` as those of the training are."""
    files = [
        Path(str(resources.files(package))) / folder / name
        for (package, folder), names in _TRAINING_FONTS.items()
        for name in names
    ]

    @cache
    def font(file: Path, size: int) -> ImageFont.FreeTypeFont:
        return ImageFont.truetype(file, size)

    def glyph(rng: random.Random, height: float) -> tuple[int, Image.Image]:
        digit = rng.randrange(10)
        ink = _ink(digit, font(rng.choice(files), _font_size(height)))
        return digit, _bent(rng, ink) if bent else ink

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
    """Handwritten digits; those of the training are bent."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.RandomState(0).permutation(len(data.target))
    chosen = order[1437:] if held_out else order[:1437]
    strokes = [_trimmed(Image.fromarray((data.images[i] * (255 / 16)).astype(np.uint8))) for i in chosen]
    digits = [int(data.target[i]) for i in chosen]

    def glyph(rng: random.Random, height: float) -> tuple[int, Image.Image]:
        i = rng.randrange(len(digits))
        small = strokes[i]  # at most 8x8 px
        size = max(1, round(height * small.width / small.height)), max(1, round(height))
        ink = small.resize(size, Image.Resampling.BICUBIC)
        return digits[i], ink if held_out else _bent(rng, ink)

    return glyph


def _font_size(height: float) -> int:
    return max(10, round(height / 0.73))  # a digit is about 0.73 of its font's size


def _ink(digit: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> Image.Image:
    """One digit, cut out at its bounds."""
    left, top, right, bottom = (round(edge) for edge in font.getbbox(str(digit)))
    ink = Image.new("L", (right - left, bottom - top))
    ImageDraw.Draw(ink).text((-left, -top), str(digit), font=font, fill=255)
    return ink


def _bent(rng: random.Random, ink: Image.Image) -> Image.Image:
    """A fifth as it is; others stretched, slanted, turned, pulled out of shape, made finer or bolder."""
    if rng.random() < 0.2:
        return ink
    stretch, slant = math.exp(rng.uniform(-0.22, 0.22)), rng.uniform(-0.22, 0.22)
    angle, spread = math.radians(rng.uniform(-12, 12)), 0.04 * min(ink.size)
    frame = round(0.15 * max(ink.size))  # so that nothing is pushed over the edge
    framed = ImageOps.expand(ink, frame)
    width, height = framed.size

    def node(column: int, row: int) -> tuple[float, float]:
        x, y = (column - 1) * width / 2, (row - 1) * height / 2
        x = (x + slant * y) * stretch
        turned = x * math.cos(angle) - y * math.sin(angle), x * math.sin(angle) + y * math.cos(angle)
        return width / 2 + turned[0] + rng.gauss(0, spread), height / 2 + turned[1] + rng.gauss(0, spread)

    net = [[node(column, row) for column in range(3)] for row in range(3)]
    edges = ((0, width // 2, width), (0, height // 2, height))
    mesh = [
        (
            (edges[0][column], edges[1][row], edges[0][column + 1], edges[1][row + 1]),
            (*net[row][column], *net[row + 1][column], *net[row + 1][column + 1], *net[row][column + 1]),
        )
        for row in range(2)
        for column in range(2)
    ]
    bent = framed.transform(framed.size, Image.Transform.MESH, mesh, Image.Resampling.BICUBIC)
    bent = bent.filter(ImageFilter.GaussianBlur(rng.uniform(0, 0.05) * ink.height))
    low, steepness = (
        rng.uniform(0.05, 0.4),
        rng.uniform(1, 2.5),
    )  # where blurred edges are cut: low makes bold
    peak = max(1, int(np.asarray(bent).max()))
    levels = [255 * steepness * (value / peak - low) / (1 - low) for value in range(256)]
    return _trimmed(bent.point([min(255, max(0, round(level))) for level in levels]))


def _trimmed(ink: Image.Image) -> Image.Image:
    return ink.crop(ink.point([0] * 64 + [255] * 192).getbbox())


def draw(rng: random.Random, glyphs: Glyphs, size: tuple[int, int]) -> tuple[Image.Image, Label]:
    """One digit somewhere in a picture of ``size`` (width, height) px."""
    room = min(size)
    smallest = max(0.7 * room, min(14, 0.9 * room))
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
        "rendered": font_glyphs(bent=False),
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
