"""``Image``: what it refuses, what its size promises, and what comes out of ``decode``."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import time
import tracemalloc
import warnings
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import numpy.typing as npt
import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ImageOps
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile

from retinue.errors import InvalidInput
from retinue.media import DEFAULT_MAX_PIXELS, FORMATS, Image

Pixels = npt.NDArray[np.uint8]
RED, GREEN, BLUE, WHITE, BLACK = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0)
ORIENTATION = 0x0112
LOSSLESS = {"WEBP": {"lossless": True}}


# -- making pictures -----------------------------------------------------------------------------------


def encoded(picture: PIL.Image.Image, format: str, **options: object) -> bytes:
    file = io.BytesIO()
    picture.copy().save(file, format, **options)  # a copy: saving leaves options behind on the picture
    return file.getvalue()


def flat(
    colour: tuple[int, ...] | int | float, mode: str = "RGB", size: tuple[int, int] = (8, 8)
) -> PIL.Image.Image:
    return PIL.Image.new(mode, size, colour)


def gradient(width: int = 48, height: int = 32) -> PIL.Image.Image:
    y, x = np.mgrid[0:height, 0:width]
    bands = [x * 255 // (width - 1), y * 255 // (height - 1), (x + y) * 255 // (width + height - 2)]
    return PIL.Image.fromarray(np.stack(bands, axis=-1).astype(np.uint8))


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(
    size: tuple[int, int], depth: int, colour: int, rows: bytes, *chunks: bytes, last: bytes = b""
) -> bytes:
    """A PNG written by hand; each of ``rows`` starts with its filter byte."""
    header = struct.pack(">IIBBBBB", *size, depth, colour, 0, 0, 0)
    body = [
        chunk(b"IHDR", header),
        *chunks,
        chunk(b"IDAT", zlib.compress(rows, 9)),
        last,
        chunk(b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


def blank_png(width: int, height: int, *chunks: bytes) -> bytes:
    return png((width, height), 1, 0, (b"\0" + bytes((width + 7) // 8)) * height, *chunks)


def tiff(tags: Mapping[int, tuple[int, ...]], pixels: bytes = bytes(64)) -> bytes:
    """A TIFF of 8x8 grey pixels written by hand, its tags overridden by ``tags`` (type, value[, count])."""
    basic = {256: (3, 8), 257: (3, 8), 258: (3, 8), 259: (3, 1), 262: (3, 1), 273: (4, 8), 277: (3, 1)}
    entries: dict[int, tuple[int, ...]] = basic | {278: (3, 8), 279: (4, len(pixels)), **tags}
    directory = struct.pack("<H", len(entries))
    for tag, (kind, value, *count) in sorted(entries.items()):
        directory += struct.pack("<HHII", tag, kind, *(count or [1]), value)
    return b"II*\0" + struct.pack("<I", 8 + len(pixels)) + pixels + directory + bytes(4)


def gif(screen: tuple[int, int], frame: tuple[int, int, int, int], control: bytes = b"") -> bytes:
    """A GIF with a red, green palette whose one frame (left, top, width, height) says it is all 0: red.

    Its pixels suffice for 8x8 alone.
    """
    pixels = encoded(flat(0, "L"), "GIF")
    coded = pixels[pixels.index(b",\0\0\0\0") + 10 :]
    head = b"GIF89a" + struct.pack("<HHBBB", *screen, 0x80, 0, 0) + bytes(RED + GREEN)
    return head + control + b"," + struct.pack("<4HB", *frame, 0) + coded


def exif(orientation: int) -> PIL.Image.Exif:
    block = PIL.Image.Exif()
    block[ORIENTATION] = orientation
    return block


def animation(format: str, frames: int = 3) -> bytes:
    colours = [RED, GREEN, BLUE]
    later = [flat(colours[number % 3]) for number in range(1, frames)]
    options = LOSSLESS.get(format, {})
    return encoded(flat(RED), format, save_all=True, append_images=later, **options)


def pixels(data: bytes, max_side: int | None = None) -> Pixels:
    picture = Image(data).decode(max_side)
    assert picture.mode == "RGB"
    return np.asarray(picture)


def corner(data: bytes) -> tuple[int, ...]:
    return tuple(int(value) for value in pixels(data)[0, 0])


def psnr(one: PIL.Image.Image, other: PIL.Image.Image) -> float:
    error = np.mean((np.asarray(one, dtype=float) - np.asarray(other, dtype=float)) ** 2)
    return float(10 * np.log10(255**2 / max(error, 1e-9)))


# -- what is refused at once ---------------------------------------------------------------------------

NOT_ACCEPTED = "not a picture of an accepted format (BMP, GIF, JPEG, PNG, TIFF, WEBP)"
REFUSED = {
    "empty": (b"", "no picture: 0 bytes"),
    "text": (b"hello, I am a picture", NOT_ACCEPTED),
    "html": (b"<!doctype html><title>404</title>", NOT_ACCEPTED),
    "svg": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', NOT_ACCEPTED),
    "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n", NOT_ACCEPTED),
    "pdf": (encoded(flat(RED), "PDF"), NOT_ACCEPTED),
    "ico": (encoded(flat(RED), "ICO"), NOT_ACCEPTED),
    "ppm": (encoded(flat(RED), "PPM"), NOT_ACCEPTED),
    "bigtiff": (encoded(flat(RED), "TIFF", big_tiff=True), NOT_ACCEPTED),
    "wav": (b"RIFF\x24\0\0\0WAVEfmt ", NOT_ACCEPTED),
    "bmp, run-length": (
        b"BM" + bytes(8) + struct.pack("<IIiiHHIIiiII", 54, 40, 8, 8, 1, 8, 1, 0, 0, 0, 0, 0) + bytes(99),
        "a run-length BMP",
    ),
    "tiff, zstd": (tiff({259: (3, 50000)}), "TIFF compression 50000, which is not read"),
    "tiff, 12 bits": (
        tiff({258: (3, 12)}),
        "TIFF grey of 12 bits, or of 16 with white as zero, which is not read",
    ),
    "tiff, 16 bits with white as zero": (
        tiff({258: (3, 16), 262: (3, 0)}, bytes(128)),
        "TIFF grey of 12 bits, or of 16 with white as zero, which is not read",
    ),
    "tiff, many samples": (tiff({277: (3, 7)}), "TIFF samples per pixel: 7, more than 6"),
    "png without pixels": (png((0, 8), 8, 0, bytes(8)), "truncated, corrupt or unsupported PNG data"),
    "png with two headers": (
        blank_png(8, 8, chunk(b"IHDR", struct.pack(">IIBBBBB", 9000, 9000, 1, 0, 0, 0, 0))),
        "truncated, corrupt or unsupported PNG data",
    ),
    "gif without a picture": (
        gif((8, 8), (0, 0, 8, 8), b";"),
        "truncated, corrupt or unsupported GIF data",
    ),
    "gif with junk before a large picture": (
        gif((8, 8), (9999, 9999, 8, 8), b"\0"),
        "truncated, corrupt or unsupported GIF data",
    ),
    "gif with an empty frame": (
        gif((8, 8), (0, 0, 0, 8)),
        "truncated, corrupt or unsupported GIF data",
    ),
    "tiff with two fill orders": (
        tiff({266: (3, 0x10001, 2)}),
        "truncated, corrupt or unsupported TIFF data",
    ),
    "tiff with values beyond its end": (
        tiff({258: (3, 9999, 4)}),
        "truncated, corrupt or unsupported TIFF data",
    ),
    "tiff with values on top of each other": (
        tiff(dict.fromkeys((258, 338, 339), (3, 0, 100))),
        "truncated, corrupt or unsupported TIFF data",
    ),
    "tiff with too many strips": (
        tiff(
            {256: (4, 1), 257: (4, 100_001), 278: (4, 1), 273: (4, 8, 100_001), 279: (4, 8, 100_001)},
            struct.pack("<I", 8) * 200_002,
        ),
        "truncated, corrupt or unsupported TIFF data",
    ),
    "jpeg with two sizes": (
        encoded(flat(RED), "JPEG").replace(
            b"\xff\xdb", b"\xff\xc0\0\x0b\x08\x40\0\x40\0\x01\0\0\0\xff\xdb", 1
        ),
        "truncated, corrupt or unsupported JPEG data",
    ),
    "jpeg of 12 bits": (
        encoded(flat(RED), "JPEG").replace(b"\xff\xc0\0\x11\x08", b"\xff\xc0\0\x11\x0c"),
        "truncated, corrupt or unsupported JPEG data",
    ),
}
SIGNATURES = [
    b"BM",
    b"GIF89a",
    b"\xff\xd8\xff",
    b"\x89PNG\r\n\x1a\n",
    b"II*\0",
    b"MM\0*",
    b"RIFF\0\0\0\0WEBP",
]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_accepted_picture_is_refused_when_it_arrives(name: str) -> None:
    data, message = REFUSED[name]
    # Recorded, not raised: as an error a warning would become InvalidInput, and pass.
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(InvalidInput) as caught:
            Image(data)
    assert str(caught.value) == message
    assert [str(warning.message) for warning in warned] == []


@pytest.mark.parametrize("signature", SIGNATURES)
@pytest.mark.parametrize("rest", [b"", bytes(99), b"\xff" * 99], ids=["alone", "zeros", "ones"])
def test_a_signature_alone_is_no_picture(signature: bytes, rest: bytes) -> None:
    with pytest.raises(InvalidInput, match=r"^truncated, corrupt or unsupported|^16383x16383 pixels"):
        Image(signature + rest)


@pytest.mark.parametrize("format", FORMATS)
def test_a_header_says_format_and_size_without_pixels(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile, "load", lambda self: pytest.fail("decoded"))
    data = encoded(gradient(), format)
    image = Image(data, url="https://example.org/a.png")
    assert (image.format, image.size, image.url) == (format, (48, 32), "https://example.org/a.png")
    assert image.data is data
    assert repr(image) == f"<Image {format} 48x32, {len(data)} bytes>"


def test_importing_the_package_does_not_import_pillow() -> None:
    program = "import sys, retinue; sys.exit('PIL' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=30).returncode == 0


# -- size and cost (FC-41) -----------------------------------------------------------------------------


def with_size(format: str, width: int, height: int) -> bytes:
    """A small file whose header claims that size."""
    data = bytearray(encoded(gradient(), format, **LOSSLESS.get(format, {})))
    if format == "PNG":
        data[16:24] = struct.pack(">II", width, height)
        data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    elif format == "JPEG":
        start = data.index(b"\xff\xc0") + 5
        data[start : start + 4] = struct.pack(">HH", height, width)
    elif format == "WEBP":
        start = data.index(b"VP8L") + 9
        data[start : start + 4] = struct.pack("<I", (width - 1) | (height - 1) << 14)
    elif format == "GIF":
        data[6:10] = struct.pack("<HH", width, height)
    elif format == "BMP":
        data[18:26] = struct.pack("<ii", width, height)
    else:
        return tiff({256: (4, width), 257: (4, height)})
    return bytes(data)


@pytest.mark.parametrize("format", FORMATS)
def test_a_header_that_claims_too_many_pixels_is_refused_before_pillow_sees_it(
    format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageFile, "__init__", lambda *args: pytest.fail("opened"))
    with pytest.raises(InvalidInput) as caught:
        Image(with_size(format, 16000, 15000))
    assert str(caught.value) == f"16000x15000 pixels, more than max_pixels={DEFAULT_MAX_PIXELS}"


@pytest.mark.parametrize("side", [30000, 13000])
def test_a_decompression_bomb_is_refused_at_once_and_pillows_guard_stays(side: int) -> None:
    bomb = blank_png(side, side)
    guard, start = PIL.Image.MAX_IMAGE_PIXELS, time.process_time()
    tracemalloc.start()
    try:
        for _ in range(32):
            with pytest.raises(InvalidInput, match=rf"^{side}x{side} pixels, more than max_pixels=\d+$"):
                Image(bomb)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.process_time() - start < 1
    assert peak < 4 * len(bomb)
    assert guard is not None
    assert guard == PIL.Image.MAX_IMAGE_PIXELS


@pytest.mark.parametrize("format", FORMATS)
def test_the_bound_itself_is_allowed(format: str) -> None:
    data = encoded(gradient(), format)
    assert Image(data, max_pixels=48 * 32).decode().size == (48, 32)
    with pytest.raises(InvalidInput, match=r"^48x32 pixels, more than max_pixels=1535$"):
        Image(data, max_pixels=48 * 32 - 1)


def test_a_bound_above_pillows_own_is_the_callers_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(gradient(), "PNG")
    with pytest.raises(ValueError, match=r"max_pixels=100000000, more than PIL\.Image\.MAX_IMAGE_PIXELS="):
        Image(data, max_pixels=100_000_000)
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", None)
    assert Image(data, max_pixels=100_000_000).size == (48, 32)


@pytest.mark.parametrize(
    ("screen", "frame", "size"),
    [
        ((65535, 65535), (0, 0, 1, 1), "65535x65535"),
        ((8, 8), (0, 0, 65535, 2000), "65535x2000"),
        ((8, 8), (30000, 30000, 8, 8), "30008x30008"),
    ],
    ids=["canvas", "frame", "offset"],
)
def test_a_gif_counts_as_large_as_its_canvas_or_its_frame(
    screen: tuple[int, int], frame: tuple[int, int, int, int], size: str
) -> None:
    with pytest.raises(InvalidInput, match=f"^{size} pixels, more than max_pixels="):
        Image(gif(screen, frame))


def test_a_gif_frame_that_disposes_of_itself_paints_nothing_when_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disposing = gif((8, 8), (0, 0, 8, 8), b"!\xf9\x04\x08\0\0\0\0")
    monkeypatch.setattr("PIL.Image.core.fill", lambda *args: pytest.fail("painted"))
    assert Image(disposing).size == (8, 8)


TEXT_CHUNKS = {
    "tEXt": b"Comment\0" + b"x" * 2**23,
    "zTXt": b"Comment\0\0" + zlib.compress(bytes(2**23), 9),
    "iTXt": b"Comment\0\1\0\0\0" + zlib.compress(b"x" * 2**23, 9),
    "iCCP": b"profile\0\0" + zlib.compress(bytes(2**23), 9),
    "teST": bytes(2**23),
}


@pytest.mark.parametrize("kind", TEXT_CHUNKS)
@pytest.mark.parametrize("place", ["before", "after"])
def test_png_metadata_is_neither_inflated_nor_copied(kind: str, place: str) -> None:
    extra = chunk(kind.encode(), TEXT_CHUNKS[kind])
    rows = b"\0\0" * 8
    data = png((8, 8), 1, 0, rows, extra) if place == "before" else png((8, 8), 1, 0, rows, last=extra)
    tracemalloc.start()
    try:
        Image(data).decode()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**20


def test_a_png_chunk_that_lies_about_its_length_is_not_counted_by_it() -> None:
    data = blank_png(8, 8).removesuffix(chunk(b"IEND", b"")) + struct.pack(">I", 2**31) + b"tEXt"
    assert corner(data) == BLACK


def test_the_later_frames_of_an_apng_are_not_metadata() -> None:
    assert corner(png((8, 8), 1, 0, b"\0\0" * 8, last=chunk(b"fdAT", bytes(2**24)))) == BLACK


def test_a_png_that_is_mostly_metadata_is_refused() -> None:
    text = chunk(b"tEXt", b"Comment\0" + b"x" * 2**20)
    with pytest.raises(InvalidInput, match=r"^\d+ bytes of PNG metadata, more than 16777216$"):
        Image(blank_png(8, 8, text * 17))


PIECES = {
    "PNG": blank_png(8, 8, chunk(b"teST", b"") * 100_001),
    "JPEG": encoded(flat(RED), "JPEG").replace(b"\xff\xd8", b"\xff\xd8" + b"\xff\xfe\0\x02" * 100_001, 1),
    "JPEG, fill bytes": encoded(flat(RED), "JPEG").replace(b"\xff\xd8", b"\xff\xd8" + b"\xff" * 100_001, 1),
    "GIF": gif((8, 8), (0, 0, 8, 8), b"!\xfe\0" * 100_001),
    "GIF, one comment": gif((8, 8), (0, 0, 8, 8), b"!\xfe" + b"\1x" * 100_001 + b"\0"),
    "WEBP": encoded(flat(RED), "WEBP") + b"teST\0\0\0\0" * 100_001,
}


@pytest.mark.parametrize("name", PIECES)
def test_a_file_of_endless_small_pieces_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match=r"^a file of more than 100000 pieces$"):
        Image(PIECES[name])


def test_a_jpeg_of_too_many_scans_is_refused() -> None:
    data = encoded(gradient(), "JPEG", progressive=True)
    start, end = data.rindex(b"\xff\xda"), data.rindex(b"\xff\xd9")
    scans = data.count(b"\xff\xda")
    assert Image(data[:end] + data[start:end] * (100 - scans) + data[end:]).size == (48, 32)
    with pytest.raises(InvalidInput, match=r"^101 JPEG scans, more than 100$"):
        Image(data[:end] + data[start:end] * (101 - scans) + data[end:])


def test_bytes_after_a_jpegs_end_are_no_scans() -> None:
    data = encoded(gradient(), "JPEG")
    assert np.array_equal(pixels(data + b"\xff\xda\0" * 200), pixels(data))


def test_a_tiff_whose_tiles_dwarf_it_is_refused() -> None:
    tags = {322: (4, 16384), 323: (4, 16384), 324: (4, 8), 325: (4, 64)}
    with pytest.raises(InvalidInput, match=r"^TIFF tiles of 268435456 pixels, more than the picture$"):
        Image(tiff(tags))


# -- upright (FC-35) -----------------------------------------------------------------------------------

TURNED: dict[int, Callable[[Pixels], Pixels]] = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: np.rot90(a),
}


def quarters() -> PIL.Image.Image:
    """64x32 in 16 pixels' steps, so that JPEG keeps it: red, green / blue, white."""
    picture = flat(WHITE, size=(64, 32))
    for colour, place in [(RED, (0, 0)), (GREEN, (32, 0)), (BLUE, (0, 16))]:
        picture.paste(flat(colour, size=(32, 16)), place)
    return picture


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", TURNED)
def test_a_picture_stands_upright_as_its_exif_says(format: str, orientation: int) -> None:
    options = {"JPEG": {"quality": 95, "subsampling": 0}} | LOSSLESS
    data = encoded(quarters(), format, exif=exif(orientation), **options.get(format, {}))
    right = TURNED[orientation](np.asarray(quarters()))
    image = Image(data)
    upright = image.decode()
    assert image.size == upright.size == (right.shape[1], right.shape[0])
    assert np.abs(np.asarray(upright, dtype=int) - right).max() <= (4 if format == "JPEG" else 0)
    assert ImageOps.exif_transpose(upright).tobytes() == upright.tobytes()  # and nobody can turn it again
    assert image.decode(max_side=16).size == (16, 8)[:: 1 if orientation < 5 else -1]


def test_a_phones_photograph_is_as_tall_as_it_was_taken() -> None:
    stored = flat(BLUE, size=(40, 20))
    stored.paste(RED, (0, 0, 10, 20))
    upright = Image(encoded(stored, "JPEG", exif=exif(6), quality=95)).decode()
    assert upright.size == (20, 40)
    assert np.asarray(upright)[2, 10, 0] > 240
    assert np.asarray(upright)[37, 10, 2] > 240


def test_exif_after_a_pngs_pixels_counts() -> None:
    block = exif(6).tobytes().removeprefix(b"Exif\0\0")
    data = png((16, 8), 8, 0, (b"\0" + bytes(16)) * 8, last=chunk(b"eXIf", block))
    assert Image(data).size == Image(data).decode().size == (8, 16)


def entry(kind: int, count: int, value: int, order: str = "<") -> bytes:
    return struct.pack(order + "HHI", ORIENTATION, kind, count) + struct.pack(order + "H2x", value)


def directory(kind: int, count: int, value: int, order: str = "<") -> bytes:
    magic = b"II*\0" if order == "<" else b"MM\0*"
    return magic + struct.pack(order + "IH", 8, 1) + entry(kind, count, value, order) + bytes(4)


BROKEN_EXIF = {
    "empty": b"",
    "not a directory": b"once upon a time",
    "header alone": b"II*\0",
    "directory beyond the end": b"II*\0" + struct.pack("<I", 99999),
    "directory cut off": directory(3, 1, 6)[:14],
    "value of 0": directory(3, 1, 0),
    "value of 9": directory(3, 1, 9),
    "value as text": directory(2, 1, 6),
    "two values": directory(3, 2, 6),
    "more entries than bytes": b"II*\0" + struct.pack("<IH", 8, 65535) + bytes(40),
    "entries that point beyond the end": b"II*\0"
    + struct.pack("<IH", 8, 2)
    + struct.pack("<HHII", 0x011A, 5, 1, 2**31) * 2,
}


@pytest.mark.parametrize("name", BROKEN_EXIF)
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_a_broken_exif_block_is_ignored(format: str, name: str) -> None:
    block = b"Exif\0\0" + BROKEN_EXIF[name]
    data = encoded(quarters(), format, exif=block, **LOSSLESS.get(format, {}))
    assert Image(data).size == (64, 32)
    assert np.array_equal(pixels(data), pixels(encoded(quarters(), format, **LOSSLESS.get(format, {}))))


READABLE_EXIF = {
    "little-endian": directory(3, 1, 6),
    "big-endian": directory(3, 1, 6, ">"),
    "a long value": directory(4, 1, 6),
    "more entries than bytes": b"II*\0" + struct.pack("<IH", 8, 9) + entry(3, 1, 6),
    "the first of two": b"II*\0" + struct.pack("<IH", 8, 2) + entry(3, 1, 6) + entry(3, 1, 1) + bytes(4),
}


@pytest.mark.parametrize("name", READABLE_EXIF)
def test_an_exif_block_counts_as_far_as_it_can_be_read(name: str) -> None:
    data = encoded(quarters(), "JPEG", exif=b"Exif\0\0" + READABLE_EXIF[name])
    assert Image(data).size == Image(data).decode().size == (32, 64)


def test_exif_counts_behind_a_chunk_of_odd_length() -> None:
    data = encoded(quarters(), "WEBP", exif=exif(6), icc_profile=b"other")
    assert Image(data).size == Image(data).decode().size == (32, 64)


# -- transparency, on white ----------------------------------------------------------------------------

HALF_RED = (255, 128, 128)  # red of alpha 127 on white


def palette_png(depth: int, alphas: bytes) -> bytes:
    return png(
        (8, 1), depth, 3, b"\0" + bytes(depth), chunk(b"PLTE", bytes(RED + GREEN)), chunk(b"tRNS", alphas)
    )


def grey_png(depth: int, row: bytes, transparent: int) -> bytes:
    width = len(row) * 8 // depth
    return png((width, 1), depth, 0, b"\0" + row, chunk(b"tRNS", struct.pack(">H", transparent)))


TRANSPARENT = {
    "RGBA, clear": (encoded(flat((*RED, 0), "RGBA"), "PNG"), WHITE),
    "RGBA, half": (encoded(flat((*RED, 127), "RGBA"), "PNG"), HALF_RED),
    "RGBA, full": (encoded(flat((*RED, 255), "RGBA"), "PNG"), RED),
    "LA": (encoded(flat((0, 127), "LA"), "PNG"), (128, 128, 128)),
    "LA, 16 bits": (png((1, 1), 16, 4, b"\0" + struct.pack(">HH", 0, 0x7FFF)), (128, 128, 128)),
    "RGBA, 16 bits": (png((1, 1), 16, 6, b"\0" + struct.pack(">4H", 0xFFFF, 0, 0, 0x7FFF)), HALF_RED),
    "palette, one clear": (palette_png(8, b"\0"), WHITE),
    "palette, half": (palette_png(8, b"\x7f\x80"), HALF_RED),
    "palette, 1 bit": (palette_png(1, b"\x7f"), HALF_RED),
    "palette, other clear": (palette_png(8, b"\xff\0"), RED),
    "RGB, one colour": (
        png((1, 1), 8, 2, b"\0" + bytes(RED), chunk(b"tRNS", struct.pack(">3H", *RED))),
        WHITE,
    ),
    "RGB, another colour": (
        png((1, 1), 8, 2, b"\0" + bytes(RED), chunk(b"tRNS", struct.pack(">3H", *BLUE))),
        RED,
    ),
    "RGB, 16 bits": (
        png((1, 1), 16, 2, b"\0\x12\x34\x56\x78\x9a\xbc", chunk(b"tRNS", b"\x12\x34\x56\x78\x9a\xbc")),
        WHITE,
    ),
    "grey, 1 bit": (grey_png(1, b"\0", 0), WHITE),
    "grey, 1 bit, other": (grey_png(1, b"\0", 1), BLACK),
    "grey, 2 bits": (grey_png(2, b"\x55", 1), WHITE),
    "grey, 4 bits": (grey_png(4, b"\x77", 7), WHITE),
    "grey, 4 bits, other": (grey_png(4, b"\x77", 8), (119, 119, 119)),
    "grey, 8 bits": (grey_png(8, b"\x40", 0x40), WHITE),
    "grey, 16 bits": (grey_png(16, b"\x40\x41", 0x4041), WHITE),
    "grey, 16 bits, other low byte": (grey_png(16, b"\x40\x41", 0x4042), (64, 64, 64)),
    "grey, 16 bits, other high byte": (grey_png(16, b"\x40\x41", 0x4141), (64, 64, 64)),
    "GIF": (gif((8, 8), (0, 0, 8, 8), b"!\xf9\x04\1\0\0\0\0"), WHITE),
    "GIF, other": (gif((8, 8), (0, 0, 8, 8), b"!\xf9\x04\1\0\0\1\0"), RED),
    "GIF, outside its frame": (gif((16, 16), (8, 8, 8, 8)), WHITE),
    "WebP": (encoded(flat((*RED, 127), "RGBA"), "WEBP", lossless=True), HALF_RED),
    "TIFF, palette": (encoded(flat(RED).quantize(4).convert("PA"), "TIFF"), RED),
    "TIFF, RGBA": (encoded(flat((*RED, 127), "RGBA"), "TIFF"), HALF_RED),
    "TIFF, premultiplied grey": (
        encoded(flat((0, 127), "LA"), "TIFF").replace(
            struct.pack("<HHII", 338, 3, 1, 2), struct.pack("<HHII", 338, 3, 1, 1)
        ),
        (128, 128, 128),
    ),
}


@pytest.mark.parametrize("name", TRANSPARENT)
def test_what_is_transparent_lies_on_white(name: str) -> None:
    data, right = TRANSPARENT[name]
    assert np.abs(np.array(corner(data)) - right).max() <= 1


def test_a_gif_frame_keeps_its_place_on_the_canvas() -> None:
    picture = pixels(gif((24, 16), (8, 4, 8, 8)))
    right = np.full((16, 24, 3), 255)
    right[4:12, 8:16] = RED
    assert np.array_equal(picture, right)


# -- depth (FC-37) and colour --------------------------------------------------------------------------

RAMP = np.tile(np.arange(256, dtype=np.uint16) * 257, (8, 1))  # 256x8, from black to white
LOW = RAMP ^ 0xFF  # the same high bytes, over other low bytes


def deep(ramp: npt.NDArray[np.uint16]) -> dict[str, bytes]:
    rgb = b"\0" + b"".join(struct.pack(">H", value) * 3 for value in ramp[0].tolist())
    little, big = (
        PIL.Image.fromarray(ramp),
        PIL.Image.frombytes("I;16B", (256, 8), ramp.astype(">u2").tobytes()),
    )
    return {
        "PNG": encoded(little, "PNG"),
        "PNG, RGB": png((256, 8), 16, 2, rgb * 8),
        "TIFF, little-endian": encoded(little, "TIFF"),
        "TIFF, big-endian": encoded(big, "TIFF"),
        "TIFF, LZW": encoded(little, "TIFF", compression="tiff_lzw"),
        "TIFF, LZW, big-endian": encoded(big, "TIFF", compression="tiff_lzw"),
        "TIFF, mode I": encoded(PIL.Image.fromarray(ramp.astype(np.int32)), "TIFF"),
    }


@pytest.mark.parametrize("name", deep(RAMP))
@pytest.mark.parametrize("ramp", [RAMP, LOW], ids=["even", "other low bytes"])
def test_sixteen_bits_become_eight_with_every_level(name: str, ramp: npt.NDArray[np.uint16]) -> None:
    picture = pixels(deep(ramp)[name]).astype(int)
    assert np.abs(picture - np.arange(256)[None, :, None]).max() <= 1
    assert len(np.unique(picture)) == 256


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (encoded(flat(0.5, "F"), "TIFF"), "floating-point pixels, which do not say what is white"),
        (encoded(flat(65536, "I"), "TIFF"), "grey values 65536..65536, outside 0..65535"),
        (encoded(flat(-1, "I"), "TIFF"), "grey values -1..-1, outside 0..65535"),
    ],
    ids=["float", "too large", "negative"],
)
def test_pixels_that_do_not_say_what_is_white_are_refused(data: bytes, message: str) -> None:
    image = Image(data)
    with pytest.raises(InvalidInput) as caught:
        image.decode()
    assert str(caught.value) == message


def adobe_cmyk() -> bytes:
    """Red, as Photoshop writes it: inverted, and marked so."""
    data = encoded(flat((0, 255, 255, 0), "CMYK"), "JPEG")
    assert b"Adobe" in data
    return data


def rgb_jpeg() -> bytes:
    """Stored as RGB, which nothing but its Adobe segment says: the components' names are 1, 2, 3."""
    data = encoded(flat(RED), "JPEG", keep_rgb=True)
    start = data.index(b"R\x11\0G\x11\0B\x11\0")
    data = data[:start] + b"\1\x11\0\2\x11\0\3\x11\0" + data[start + 9 :]
    return data.replace(b"R\0G\0B\0", b"\1\0\2\0\3\0")


def top_down_bmp() -> bytes:
    data = encoded(flat(RED), "BMP")
    return data[:22] + struct.pack("<i", -8) + data[26:]


OS2_BMP = b"BM" + bytes(8) + struct.pack("<IIHHHH", 26, 12, 1, 1, 1, 24) + bytes(BLUE) + b"\0"  # which is BGR
COLOURS = {
    "1, white": (encoded(flat(1, "1"), "PNG"), WHITE),
    "1, black": (encoded(flat(0, "1"), "BMP"), BLACK),
    "1, group 4": (encoded(flat(1, "1"), "TIFF", compression="group4"), WHITE),
    "grey": (encoded(flat(77, "L"), "PNG"), (77, 77, 77)),
    "grey JPEG": (encoded(flat(77, "L"), "JPEG"), (77, 77, 77)),
    "palette": (encoded(flat(RED).quantize(4), "PNG"), RED),
    "palette BMP": (encoded(flat(RED).quantize(4), "BMP"), RED),
    "palette GIF": (encoded(flat(RED), "GIF"), RED),
    "palette TIFF": (encoded(flat(RED).quantize(4), "TIFF"), RED),
    "RGB": (encoded(flat(RED), "BMP"), RED),
    "RGB BMP from the top": (top_down_bmp(), RED),
    "RGB BMP of OS/2": (OS2_BMP, RED),
    "RGB JPEG": (rgb_jpeg(), RED),
    "CMYK JPEG": (adobe_cmyk(), RED),
    "CMYK TIFF": (encoded(flat((0, 255, 255, 0), "CMYK"), "TIFF"), RED),
    "YCbCr TIFF": (encoded(flat(RED).convert("YCbCr"), "TIFF"), RED),
    "YCbCr JPEG in TIFF": (encoded(flat(RED).convert("YCbCr"), "TIFF", compression="jpeg"), RED),
    "LAB TIFF": (encoded(flat((138, 209, 198), "LAB"), "TIFF"), RED),
    "WebP": (encoded(flat(RED), "WEBP", lossless=True), RED),
}


@pytest.mark.parametrize("name", COLOURS)
def test_every_colour_model_becomes_the_rgb_it_means(name: str) -> None:
    data, right = COLOURS[name]
    assert np.abs(np.array(corner(data)) - right).max() <= 5


# -- the first frame (FC-39) ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("container", "format"),
    [("GIF", "GIF"), ("WEBP", "WEBP"), ("PNG", "PNG"), ("TIFF", "TIFF"), ("MPO", "JPEG")],
)
def test_an_animation_is_its_first_frame(container: str, format: str) -> None:
    image = Image(animation(container))
    picture = image.decode()
    assert (image.format, image.size, picture.size) == (format, (8, 8), (8, 8))
    assert np.abs(np.asarray(picture, dtype=int) - RED).max() <= 2


def test_an_apng_that_lies_about_its_frames_is_still_a_png() -> None:
    twice = chunk(b"acTL", struct.pack(">II", 0, 0)) * 2 + chunk(b"fcTL", bytes(26))
    assert corner(png((1, 1), 8, 0, b"\0\x40", twice)) == (64, 64, 64)


def test_a_malformed_mpo_is_still_a_jpeg() -> None:
    data = encoded(flat(RED), "JPEG")
    index = b"\xff\xe2" + struct.pack(">H", 14) + b"MPF\0II*\0\x08\0\0\0"
    assert np.array_equal(pixels(data[:2] + index + data[2:]), pixels(data))


def seconds(data: bytes) -> float:
    best = 9.0
    for _ in range(7):
        start = time.process_time()
        Image(data).decode()
        best = min(best, time.process_time() - start)
    return best


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP"])
def test_two_thousand_frames_cost_no_more_than_one(format: str) -> None:
    still = encoded(flat(RED, size=(512, 512)), format)
    if format == "PNG":
        later = chunk(b"fcTL", bytes(26)) + chunk(b"fdAT", bytes(64))
        many = still.replace(chunk(b"IEND", b""), later * 1999 + chunk(b"IEND", b""))
    elif format == "GIF":
        many = still[:-1] + still[still.index(b",\0\0\0\0") : -1] * 1999 + b";"
    else:
        frame = still[12:]
        header = b"VP8X\x0a\0\0\0\x02\0\0\0\xff\x01\0\xff\x01\0" + b"ANIM\x06\0\0\0" + bytes(6)
        part = bytes(6) + b"\xff\x01\0\xff\x01\0" + bytes(4) + frame
        body = b"WEBP" + header + (b"ANMF" + struct.pack("<I", len(part)) + part) * 2000
        many = b"RIFF" + struct.pack("<I", len(body)) + body
    assert np.abs(pixels(many).astype(int) - RED).max() <= 2
    assert seconds(many) < 2 * seconds(still) + 0.005


# -- what is broken further in -------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("share", [0.5, 0.8, 0.9])
def test_truncated_data_is_the_callers_and_its_error_tells_nothing_else(format: str, share: float) -> None:
    data = encoded(gradient(), format)
    with pytest.raises(InvalidInput) as caught:
        Image(data[: int(len(data) * share)]).decode()
    assert str(caught.value) == f"truncated, corrupt or unsupported {format} data"
    assert caught.value.__context__ is None  # Pillow's error would hold on to its frames, and they to pixels
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    "error",
    [OSError, SyntaxError, ValueError, IndexError, TypeError, KeyError, struct.error, zlib.error, EOFError],
)
def test_whatever_pillow_raises_is_the_callers(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(self: object) -> None:
        raise error("secret: /usr/lib/plugin.so")

    image = Image(encoded(gradient(), "PNG"))
    monkeypatch.setattr(ImageFile, "load", load)
    with pytest.raises(InvalidInput, match=r"^truncated, corrupt or unsupported PNG data$"):
        image.decode()


def test_being_out_of_memory_is_not_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: object) -> None:
        raise MemoryError

    image = Image(encoded(gradient(), "PNG"))
    monkeypatch.setattr(ImageFile, "load", load)
    with pytest.raises(MemoryError):
        image.decode()


CORPUS = {
    "PNG": encoded(gradient(), "PNG", exif=exif(6)),
    "PNG, palette": encoded(flat((*RED, 127), "RGBA").quantize(4), "PNG"),
    "PNG, 16 bits": encoded(PIL.Image.fromarray(RAMP), "PNG"),
    "APNG": animation("PNG"),
    "JPEG": encoded(gradient(), "JPEG", exif=exif(6)),
    "JPEG, progressive": encoded(gradient(), "JPEG", progressive=True),
    "JPEG, CMYK": encoded(gradient().convert("CMYK"), "JPEG"),
    "MPO": animation("MPO"),
    "WebP": encoded(gradient(), "WEBP", exif=exif(6)),
    "WebP, lossless": encoded(flat((*RED, 127), "RGBA"), "WEBP", lossless=True),
    "WebP, animated": animation("WEBP"),
    "GIF": animation("GIF"),
    "GIF, transparent": gif((16, 16), (4, 4, 8, 8), b"!\xf9\x04\x09\0\0\0\0"),
    "BMP": encoded(gradient(), "BMP"),
    "BMP, palette": encoded(gradient().quantize(16), "BMP"),
    "TIFF": encoded(gradient(), "TIFF", exif=exif(6)),
    "TIFF, pages": animation("TIFF"),
    "TIFF, LZW": encoded(gradient(), "TIFF", compression="tiff_lzw"),
    "TIFF, JPEG": encoded(gradient().convert("YCbCr"), "TIFF", compression="jpeg"),
    "TIFF, 16 bits": encoded(PIL.Image.fromarray(RAMP), "TIFF"),
    "TIFF, tiles": tiff({322: (4, 16), 323: (4, 16), 324: (4, 8), 325: (4, 256)}, bytes(256)),
}
# Most of what a flip can upset is in a header; a TIFF's is at the end.
PLACES = st.one_of(st.integers(0, 200), st.integers(-200, -1), st.integers(0, 2**16))
FLIPS = st.lists(st.tuples(PLACES, st.integers(1, 255)), min_size=1, max_size=6)


@settings(max_examples=1500, deadline=None, derandomize=True)
@given(name=st.sampled_from(sorted(CORPUS)), flips=FLIPS, max_side=st.sampled_from([None, 8]))
def test_flipped_bytes_give_a_picture_of_the_promised_size_or_invalid_input(
    name: str, flips: list[tuple[int, int]], max_side: int | None
) -> None:
    data = bytearray(CORPUS[name])
    for place, mask in flips:
        data[place % len(data)] ^= mask
    # Recorded, not raised: as an error a warning would become InvalidInput, and pass.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            image = Image(bytes(data), max_pixels=2**20)
            picture = image.decode(max_side)
        except InvalidInput:
            pass
        else:
            assert picture.mode == "RGB"
            assert picture.size == image.size or max(picture.size) == max_side
    assert [str(warning.message) for warning in caught] == []


# -- smaller -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("size", "max_side", "right"),
    [
        ((400, 300), 100, (100, 75)),
        ((300, 400), 100, (75, 100)),
        ((400, 300), 400, (400, 300)),
        ((400, 300), 4000, (400, 300)),
        ((401, 299), 100, (100, 75)),
        ((1000, 1), 10, (10, 1)),
        ((1, 1), 1, (1, 1)),
    ],
)
def test_max_side_bounds_the_longer_side_and_never_enlarges(
    format: str, size: tuple[int, int], max_side: int, right: tuple[int, int]
) -> None:
    assert Image(encoded(flat(RED, size=size), format)).decode(max_side).size == right


def detailed() -> PIL.Image.Image:
    """Noise of every scale under sharp edges, 1200x900: harder than any photograph."""
    draw = np.random.default_rng(0)
    total = np.zeros((900, 1200, 3))
    for step in (1, 4, 30):
        noise = draw.integers(0, 80, (900 // step, 1200 // step, 3))
        total += np.kron(noise, np.ones((step, step, 1)))
    total[::50] = 0
    return PIL.Image.fromarray(total.clip(0, 255).astype(np.uint8))


@pytest.mark.parametrize("max_side", [64, 149, 224, 299, 448, 599, 1000])
@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_a_reduced_decode_looks_like_a_full_one_made_smaller(format: str, max_side: int) -> None:
    image = Image(encoded(detailed(), format))
    small = image.decode(max_side)
    plain = image.decode().resize(small.size, PIL.Image.Resampling.LANCZOS)
    assert psnr(small, plain) >= 32


def test_a_jpeg_is_never_decoded_in_full_for_a_small_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    load = JpegImageFile.load

    def spy(self: JpegImageFile) -> object:
        decoded.append(self.size)
        return load(self)

    monkeypatch.setattr(JpegImageFile, "load", spy)
    Image(encoded(flat(RED, size=(1600, 800)), "JPEG")).decode(100)
    assert set(decoded) == {(200, 100)}


@pytest.mark.parametrize("max_side", [0, -1])
def test_a_max_side_below_one_is_the_callers_mistake(max_side: int) -> None:
    image = Image(encoded(gradient(), "PNG"))
    with pytest.raises(ValueError, match=f"^max_side={max_side}, less than 1$"):
        image.decode(max_side)


# -- what is left behind -------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("max_side", [None, 16])
def test_a_decoded_picture_is_plain_pixels(format: str, max_side: int | None) -> None:
    picture = Image(encoded(gradient(), format)).decode(max_side)
    assert type(picture) is PIL.Image.Image
    assert picture.info == {}


@pytest.mark.parametrize("format", FORMATS)
def test_several_threads_may_decode_one_image(format: str) -> None:
    image = Image(encoded(gradient(), format))
    right, start = image.decode().tobytes(), Barrier(8)

    def decode() -> bytes:
        start.wait(timeout=10)
        return image.decode().tobytes()

    with ThreadPoolExecutor(8) as pool:
        results = [pool.submit(decode) for _ in range(8)]
    assert [result.result() == right for result in results] == [True] * 8
