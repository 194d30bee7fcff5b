"""What a backend's ``preprocess`` gets: the bytes of one picture, checked, and how to decode them.

``_cut_*`` reads the headers of one container and writes the file that Pillow gets: the first frame, and
none of the metadata that Pillow would inflate, keep or warn about. That keeps four promises:

    The size is known, and refused, before anything is allocated.
    Text, profiles, thumbnails and later frames cost next to nothing.
    Pillow has nothing to warn about. (Silencing it instead would be a setting of the whole process:
    ``warnings.catch_warnings`` is not thread-safe before Python 3.14.)
    EXIF is read here, for its orientation alone, so a broken block can do no harm.

Any thread may call anything in this module: there is no state.
"""

from __future__ import annotations

import io
import itertools
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar, cast

import PIL.Image
from PIL import ImageChops
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from retinue.encoder.cache import content_key
from retinue.errors import InvalidInput

__all__ = ["DEFAULT_MAX_PIXELS", "FORMATS", "Image"]

#: 8192x8192: a 64-megapixel photograph passes. Its RGB takes 256 MiB, for Pillow spends 4 bytes on a pixel.
DEFAULT_MAX_PIXELS = 2**26

# Far above what real files hold; a file of empty chunks would cost seconds of Python.
_MAX_PIECES = 100_000
_MAX_METADATA_BYTES = 2**24
# As many as a progressive encoder ever writes, several times over; each scan is a pass over all pixels.
_MAX_SCANS = 100
_SCAN = b"\xff\xda"
_SCAN_OR_END = re.compile(rb"\xff[\xda\xd9]")  # coded data never holds the latter, so it is the end

# JPEG is decoded at the smallest scale that is at least so many times the wanted size. With 1.4, 1080p comes
# to 336 px from a quarter; docs/log.md has what that costs.
_DRAFT = 1.4

T = TypeVar("T")
Size = tuple[int, int]
Entry = tuple[int, int, bytes]  # of a TIFF directory: type, count, the value or its offset


class Image:
    """One picture as it came, its header checked and its pixels still encoded.

    ``format`` is one of ``FORMATS``; ``size`` is the (width, height) that ``decode()`` gives, upright.
    ``url`` is where the bytes came from, if anywhere. Raises ``InvalidInput`` when the bytes are empty, no
    picture of an accepted format, or more than ``max_pixels``. ``max_pixels`` may not exceed
    ``PIL.Image.MAX_IMAGE_PIXELS``, which stays what it is: raise that first (``ValueError``).

    Accepted are the raster formats whose headers this module reads itself; a container's first frame
    counts, so an APNG is a PNG and an MPO is a JPEG. Not accepted, on purpose: EPS and PDF (run Ghostscript),
    SVG, WMF (drawing programs), ICO, ICNS, PSD (several pictures of several sizes), AVIF, HEIC, JPEG 2000
    (large decoders with sizes inside that the header does not bound), BigTIFF, run-length BMP (decoded in
    Python), and Pillow's many formats that no client sends.
    """

    __slots__ = ("_content_key", "data", "format", "size", "url")

    def __init__(self, data: bytes, *, url: str | None = None, max_pixels: int = DEFAULT_MAX_PIXELS) -> None:
        _check_bound(max_pixels)
        self.data = bytes(data)
        self.url = url
        self._content_key: tuple[int, bytes] | None = None
        self.format = _sniff(self.data)
        frame = _or_invalid(self.format, lambda: _CUTTERS[self.format](self.data))
        self.size = _upright(frame.size, frame.orientation)
        if self.size[0] * self.size[1] > max_pixels:
            raise InvalidInput(f"{_by(self.size)} pixels, more than max_pixels={max_pixels}")
        _or_invalid(self.format, lambda: _open(frame))

    def __repr__(self) -> str:
        return f"<Image {self.format} {_by(self.size)}, {len(self.data)} bytes>"

    @property
    def content_key(self) -> tuple[int, bytes]:
        """Length and SHA-256 of ``data``, computed once: equal for the same picture file."""
        if self._content_key is None:
            self._content_key = content_key(self.data)
        return self._content_key

    def decode(self, max_side: int | None = None) -> PIL.Image.Image:
        """Decode the first frame: RGB, upright, transparency on white, without metadata.

        With ``max_side`` the picture is made smaller, never larger, until its longer side is at most that;
        JPEG is then decoded at a reduced scale, several times faster. Grey of 16 bits keeps its high byte.
        Integer grey of 32 bits is read as 16; values outside 0..65535 raise ``InvalidInput``, and so do
        floating-point pixels, for neither says what is white. Colour profiles are not applied.

        Raises ``InvalidInput`` for data that is truncated or corrupt. Each call decodes anew.
        """
        if max_side is not None and max_side < 1:
            raise ValueError(f"max_side={max_side}, less than 1")
        return _or_invalid(self.format, lambda: _decode(_CUTTERS[self.format](self.data), max_side))


# -- from bytes to pixels ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Frame:
    """The first frame of a file: ``file`` is what Pillow gets, ``size`` what it must find in it.

    ``box`` is the part of the canvas that the frame covers, if not all; the rest is transparent.
    """

    format: str
    file: bytes
    size: Size
    orientation: int = 1
    box: tuple[int, int, int, int] | None = None


_OPENERS: Mapping[str, type[ImageFile]] = MappingProxyType(
    {
        "BMP": BmpImageFile,
        "GIF": GifImageFile,
        "JPEG": JpegImageFile,
        "PNG": PngImageFile,
        "TIFF": TiffImageFile,
        "WEBP": WebPImageFile,
    }
)

#: The values of ``Image.format``.
FORMATS = tuple(_OPENERS)

_SIGNATURES: Mapping[str, tuple[bytes, ...]] = MappingProxyType(
    {
        "BMP": (b"BM",),
        "GIF": (b"GIF87a", b"GIF89a"),
        "JPEG": (b"\xff\xd8\xff",),
        "PNG": (b"\x89PNG\r\n\x1a\n",),
        "TIFF": (b"II*\0", b"MM\0*"),
        "WEBP": (b"RIFF",),
    }
)

_UPRIGHT: Mapping[int, PIL.Image.Transpose] = MappingProxyType(
    {
        2: PIL.Image.Transpose.FLIP_LEFT_RIGHT,
        3: PIL.Image.Transpose.ROTATE_180,
        4: PIL.Image.Transpose.FLIP_TOP_BOTTOM,
        5: PIL.Image.Transpose.TRANSPOSE,
        6: PIL.Image.Transpose.ROTATE_270,
        7: PIL.Image.Transpose.TRANSVERSE,
        8: PIL.Image.Transpose.ROTATE_90,
    }
)


def _check_bound(max_pixels: int) -> None:
    bound = PIL.Image.MAX_IMAGE_PIXELS
    if bound is not None and max_pixels > bound:
        raise ValueError(f"max_pixels={max_pixels}, more than PIL.Image.MAX_IMAGE_PIXELS={bound}")


def _sniff(data: bytes) -> str:
    if not data:
        raise InvalidInput("no picture: 0 bytes")
    for format_, signatures in _SIGNATURES.items():
        if data.startswith(signatures) and (format_ != "WEBP" or data[8:12] == b"WEBP"):
            return format_
    raise InvalidInput(f"not a picture of an accepted format ({', '.join(FORMATS)})")


def _or_invalid(format_: str, read: Callable[[], T]) -> T:
    """Call ``read``; whatever it raises about the bytes becomes one ``InvalidInput``.

    Pillow's plugins raise OSError, SyntaxError, ValueError, struct.error, KeyError and more for a bad file.
    Our error is raised after theirs is gone: it quotes nothing and holds on to no half-decoded picture.
    """
    try:
        return read()
    except (InvalidInput, MemoryError):
        raise
    except Exception:
        pass
    raise InvalidInput(f"truncated, corrupt or unsupported {format_} data")


def _open(frame: _Frame) -> ImageFile:
    image = _OPENERS[frame.format](io.BytesIO(frame.file))
    if image.size != frame.size:
        raise ValueError("Pillow reads another size")
    return image


def _decode(frame: _Frame, max_side: int | None) -> PIL.Image.Image:
    image = _open(frame)
    target = _fit(frame.size, max_side)
    enough = round(_DRAFT * target[0]), round(_DRAFT * target[1])
    drafted = image.draft(None, enough) if target != frame.size else None
    image.load()
    rgb = _rgb(image) if frame.box is None else _on_canvas(_rgb(image.crop(frame.box)), frame)
    if target != frame.size:
        rgb = rgb.resize(
            target,
            PIL.Image.Resampling.LANCZOS,
            box=drafted[1] if drafted else None,
            reducing_gap=3.0,
        )
    if frame.orientation in _UPRIGHT:
        rgb = rgb.transpose(_UPRIGHT[frame.orientation])
    if rgb is image:
        rgb = image.copy()  # a plain picture: image holds the file, and for WebP the decoder
    rgb.info.clear()  # an EXIF block left here would have exif_transpose turn the picture again
    return rgb


def _fit(size: Size, max_side: int | None) -> Size:
    longer = max(size)
    if max_side is None or longer <= max_side:
        return size
    return max(1, round(size[0] * max_side / longer)), max(1, round(size[1] * max_side / longer))


def _rgb(image: PIL.Image.Image) -> PIL.Image.Image:
    if image.mode == "F":
        raise InvalidInput("floating-point pixels, which do not say what is white")
    if image.mode.startswith("I"):
        return _rgb_of_grey16(image)
    if image.mode == "La":
        image = image.convert("LA")  # Pillow converts premultiplied grey to nothing else
    if image.has_transparency_data:
        return _on_white(image if image.mode == "RGBA" else image.convert("RGBA"))
    return image if image.mode == "RGB" else image.convert("RGB")


def _rgb_of_grey16(image: PIL.Image.Image) -> PIL.Image.Image:
    """The high bytes. Pillow's own conversion clips at 255, which leaves a white silhouette."""
    transparent = image.info.get("transparency")
    if image.mode == "I":
        image = _narrowed(image)
    raw = image.tobytes()
    first, second = (PIL.Image.frombytes("L", image.size, raw[start::2]) for start in (0, 1))
    high, low = (first, second) if image.mode == "I;16B" else (second, first)
    if not isinstance(transparent, int):
        return high.convert("RGB")
    differs = ImageChops.lighter(_unlike(high, transparent >> 8), _unlike(low, transparent & 0xFF))
    return _on_white(PIL.Image.merge("LA", (high, differs)).convert("RGBA"))


def _narrowed(image: PIL.Image.Image) -> PIL.Image.Image:
    lowest, highest = cast(tuple[int, int], image.getextrema())
    if lowest < 0 or highest > 0xFFFF:
        raise InvalidInput(f"grey values {lowest}..{highest}, outside 0..65535")
    return image.convert("I;16")


def _unlike(band: PIL.Image.Image, value: int) -> PIL.Image.Image:
    return band.point([0 if other == value else 255 for other in range(256)])


def _on_white(rgba: PIL.Image.Image) -> PIL.Image.Image:
    canvas = PIL.Image.new("RGB", rgba.size, "white")
    canvas.paste(rgba, mask=rgba)
    return canvas


def _on_canvas(rgb: PIL.Image.Image, frame: _Frame) -> PIL.Image.Image:
    canvas = PIL.Image.new("RGB", frame.size, "white")
    canvas.paste(rgb, frame.box)
    return canvas


def _upright(size: Size, orientation: int) -> Size:
    return (size[1], size[0]) if 5 <= orientation <= 8 else size


def _by(size: Size) -> str:
    return f"{size[0]}x{size[1]}"


# -- cutting the first frame out of its container ------------------------------------------------------
# What these raise, struct.error and IndexError included, becomes InvalidInput in _or_invalid.


def _bounded(pieces: Iterable[T]) -> Iterator[T]:
    for number, piece in enumerate(pieces):
        if number == _MAX_PIECES:
            raise InvalidInput(f"a file of more than {_MAX_PIECES} pieces")
        yield piece


_PNG_PIXELS = frozenset({b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"})
_PNG_FRAMES = frozenset({b"acTL", b"fcTL", b"fdAT"})


def _cut_png(data: bytes) -> _Frame:
    """An APNG gives its default image, which is what a viewer without animation shows."""
    name, width, height, depth, colour = struct.unpack_from(">4sIIBB", data, 12)
    if name != b"IHDR":
        raise ValueError("no header")
    view, exif, skipped = memoryview(data), b"", 0
    parts: list[bytes | memoryview] = [view[:8]]
    for kind, start, end in _bounded(_png_chunks(data)):
        if kind == b"tRNS":
            parts.append(_png_transparency(data[start:end], depth, colour))
        elif kind in _PNG_PIXELS:
            parts.append(view[start:end])
        elif kind not in _PNG_FRAMES:
            skipped += min(end, len(data)) - start
            exif = exif or (data[start + 8 : end - 4] if kind == b"eXIf" else b"")
    if skipped > _MAX_METADATA_BYTES:
        raise InvalidInput(f"{skipped} bytes of PNG metadata, more than {_MAX_METADATA_BYTES}")
    return _Frame("PNG", b"".join(parts), (width, height), _orientation(exif))


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    start, kind = 8, b""
    while start + 8 <= len(data) and kind != b"IEND":
        length, kind = struct.unpack_from(">I4s", data, start)
        yield kind, start, start + 12 + length
        start += 12 + length


def _png_transparency(chunk: bytes, depth: int, colour: int) -> bytes:
    """``chunk`` in the 8-bit values that Pillow unpacks to; it compares them with the file's as they are."""
    if (depth, colour) == (16, 2):
        body = bytes(byte for value in struct.unpack_from(">3H", chunk, 8) for byte in (0, value >> 8))
    elif depth in (2, 4) and colour == 0:
        (value,) = struct.unpack_from(">H", chunk, 8)
        body = struct.pack(">H", (value & (2**depth - 1)) * 255 // (2**depth - 1))
    else:
        return chunk
    return struct.pack(">I", len(body)) + b"tRNS" + body + struct.pack(">I", zlib.crc32(b"tRNS" + body))


_JPEG_SIZES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# Tables and frame headers; JFIF and Adobe, for they say how the colours are meant.
_JPEG_PIXELS = frozenset(range(0xC0, 0xD0)) | {0xDA, 0xDB, 0xDD, 0xE0, 0xEE}
_JPEG_BARE = frozenset({0x00, 0x01, 0xFF}) | frozenset(range(0xD0, 0xDA))


def _cut_jpeg(data: bytes) -> _Frame:
    view, exif, sizes = memoryview(data), b"", []
    parts: list[bytes | memoryview] = [view[:2]]
    for marker, start, end in _bounded(_jpeg_segments(data)):
        if marker in _JPEG_PIXELS:
            parts.append(view[start:end])
        if marker in _JPEG_SIZES:
            sizes.append(struct.unpack_from(">HH", data, start + 5))
        if marker == 0xE1 and data.startswith(b"Exif\0\0", start + 4):
            exif = exif or data[start + 4 : end]
    ((height, width),) = sizes
    return _Frame("JPEG", b"".join(parts), (width, height), _orientation(exif))


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Up to the first scan, which stands for all that follows it."""
    start = 2
    while True:
        start = data.index(b"\xff", start)
        marker = data[start + 1]
        if marker == 0xDA:
            _check_scans(data, start)
            yield marker, start, len(data)
            return
        # A marker's 0xFF may be repeated at will: the last one counts.
        length = 1 if marker == 0xFF else 2
        if marker not in _JPEG_BARE:
            length += struct.unpack_from(">H", data, start + 2)[0]
        yield marker, start, start + length
        start += length


def _check_scans(data: bytes, start: int) -> None:
    marks = (mark[0] for mark in _SCAN_OR_END.finditer(data, start))
    scans = sum(1 for _ in itertools.takewhile(lambda mark: mark == _SCAN, marks))
    if scans > _MAX_SCANS:
        raise InvalidInput(f"{scans} JPEG scans, more than {_MAX_SCANS}")


def _cut_webp(data: bytes) -> _Frame:
    kind = data[12:16]
    if kind == b"VP8X":
        size = 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    elif kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        size = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    else:
        width, height = struct.unpack_from("<HH", data, 26)
        size = width & 0x3FFF, height & 0x3FFF
    exif = next(
        (data[start:end] for name, start, end in _bounded(_riff_chunks(data)) if name == b"EXIF"), b""
    )
    return _Frame("WEBP", data, size, _orientation(exif))


def _riff_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    start = 12
    while start + 8 <= len(data):
        name, length = struct.unpack_from("<4sI", data, start)
        yield name, start + 8, start + 8 + length
        start += 8 + length + length % 2


def _cut_gif(data: bytes) -> _Frame:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    head = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    control, start = b"", head
    for label, start in _bounded(_gif_blocks(data, head)):
        if label == 0xF9:
            # Without its disposal, for which Pillow would paint a second picture as it opens the file.
            control = b"!\xf9\x04" + bytes([data[start + 3] & ~0x1C]) + data[start + 4 : start + 8]
    introducer, left, top, frame_width, frame_height = struct.unpack_from("<B4H", data, start)
    if introducer != 0x2C or not frame_width or not frame_height:
        raise ValueError("no picture in the first frame")
    box = (left, top, left + frame_width, top + frame_height)
    size = max(width, box[2]), max(height, box[3])  # as Pillow and browsers grow it
    whole = box == (0, 0, *size)
    return _Frame("GIF", data[:head] + control + data[start:], size, box=None if whole else box)


def _gif_blocks(data: bytes, start: int) -> Iterator[tuple[int, int]]:
    """Each extension by its label, each of its further blocks as 0, and last, as 0 too, what follows them."""
    while data[start] == 0x21:
        yield data[start + 1], start
        start += 2
        while data[start]:
            start += 1 + data[start]
            yield 0, start
        start += 1
    yield 0, start


def _cut_bmp(data: bytes) -> _Frame:
    (header,) = struct.unpack_from("<I", data, 14)
    if header == 12:
        return _Frame("BMP", data, struct.unpack_from("<HH", data, 18))
    width, height, _, _, compression = struct.unpack_from("<iiHHI", data, 18)
    if compression in (1, 2):
        raise InvalidInput("a run-length BMP")
    return _Frame("BMP", data, (width, abs(height)))


_BITS, _COMPRESSION, _PHOTOMETRIC, _TURN, _SAMPLES = 258, 259, 262, 274, 277
#: What says where the pixels are and how they are coded, and whether Pillow wants exactly one value.
_TIFF_PIXELS: Mapping[int, bool] = MappingProxyType(
    {
        256: True,  # width
        257: True,  # height
        _BITS: False,
        _COMPRESSION: True,
        _PHOTOMETRIC: True,
        266: True,  # fill order
        273: False,  # where the strips are
        _SAMPLES: True,
        278: True,  # rows per strip
        279: False,  # how long the strips are
        284: True,  # planar configuration
        292: True,  # group 3 options
        293: True,  # group 4 options
        317: True,  # predictor
        320: False,  # colour map
        322: True,  # tile width
        323: True,  # tile height
        324: False,  # where the tiles are
        325: False,  # how long the tiles are
        338: False,  # extra samples
        339: False,  # sample format
        347: False,  # JPEG tables
        529: False,  # YCbCr coefficients
        530: False,  # YCbCr subsampling
        532: False,  # reference black and white
    }
)
#: None, CCITT, LZW, JPEG, deflate (two numbers), PackBits.
_TIFF_COMPRESSIONS = frozenset({1, 2, 3, 4, 5, 7, 8, 32773, 32946})
#: Bytes of one value, by type: BYTE, SHORT, LONG, RATIONAL, UNDEFINED.
_TIFF_WIDTHS: Mapping[int, int] = MappingProxyType({1: 1, 3: 2, 4: 4, 5: 8, 7: 1})


def _cut_tiff(data: bytes) -> _Frame:
    """The same file with another directory, at its end, that lists the pixels of the first page alone."""
    order, entries = _directory(data)
    kept = {tag: entry for tag, entry in entries.items() if tag in _TIFF_PIXELS}
    if sum(_far_bytes(order, data, tag, entry) for tag, entry in kept.items()) > len(data):
        raise ValueError("values on top of each other")
    numbers = {tag: _number(order, entry) for tag, entry in kept.items()}
    _check_tiff(numbers)
    directory = b"".join(struct.pack(order + "HHI4s", tag, *entry) for tag, entry in sorted(kept.items()))
    parts: list[bytes | memoryview] = [
        data[:4] + struct.pack(order + "I", len(data)),
        memoryview(data)[8:],
        struct.pack(order + "H", len(kept)) + directory + bytes(4),
    ]
    turn = _number(order, entries[_TURN]) if _TURN in entries else 1
    return _Frame("TIFF", b"".join(parts), (numbers[256], numbers[257]), turn)


def _check_tiff(numbers: Mapping[int, int]) -> None:
    if numbers.get(_COMPRESSION, 1) not in _TIFF_COMPRESSIONS:
        raise InvalidInput(f"TIFF compression {numbers[_COMPRESSION]}, which is not read")
    if numbers.get(_SAMPLES, 1) > 6:
        raise InvalidInput(f"TIFF samples per pixel: {numbers[_SAMPLES]}, more than 6")
    # Pillow leaves 12 bits at the low end of 16, and does not invert 16 bits whose 0 is white.
    if numbers.get(_BITS) == 12 or (numbers.get(_BITS) == 16 and numbers.get(_PHOTOMETRIC, 0) == 0):
        raise InvalidInput("TIFF grey of 12 bits, or of 16 with white as zero, which is not read")
    tile = numbers.get(322, 0) * numbers.get(323, 0)
    if tile > max(numbers[256] * numbers[257], 2**22):
        raise InvalidInput(f"TIFF tiles of {tile} pixels, more than the picture")


def _directory(tiff: bytes) -> tuple[str, dict[int, Entry]]:
    """Byte order and entries of the first directory, the first of each tag; a cut-off end is left out."""
    order = {b"II*\0": "<", b"MM\0*": ">"}[tiff[:4]]
    (start,) = struct.unpack_from(order + "I", tiff, 4)
    (count,) = struct.unpack_from(order + "H", tiff, start)
    entries: dict[int, Entry] = {}
    for at in range(start + 2, min(start + 2 + 12 * count, len(tiff) - 11), 12):
        tag, kind, length, value = struct.unpack_from(order + "HHI4s", tiff, at)
        entries.setdefault(tag, (kind, length, value))
    return order, entries


def _far_bytes(order: str, data: bytes, tag: int, entry: Entry) -> int:
    """How many bytes the entry's values take elsewhere in the file; raises for values that cannot be."""
    kind, count, value = entry
    length = _TIFF_WIDTHS[kind] * count
    (offset,) = struct.unpack(order + "I", value)
    if count > _MAX_PIECES or (count > 1 and _TIFF_PIXELS[tag]):
        raise ValueError("a number of values that this tag cannot have")
    if length <= 4:
        return 0
    if offset + length > len(data):
        raise ValueError("values beyond the end of the file")
    return length


def _number(order: str, entry: Entry) -> int:
    """The value of an entry that holds one integer in place; 0 for any other, which no tag here may be."""
    kind, count, value = entry
    if count != 1 or kind not in (3, 4):
        return 0
    number: int = struct.unpack_from(order + ("H" if kind == 3 else "I"), value)[0]
    return number


def _orientation(exif: bytes) -> int:
    """As EXIF numbers it; 1 when the block is absent or broken. XMP's copy is not read: no browser does."""
    try:
        order, entries = _directory(exif.removeprefix(b"Exif\0\0"))
        return _number(order, entries[_TURN])
    except (KeyError, struct.error):
        return 1


_CUTTERS: Mapping[str, Callable[[bytes], _Frame]] = MappingProxyType(
    {
        "BMP": _cut_bmp,
        "GIF": _cut_gif,
        "JPEG": _cut_jpeg,
        "PNG": _cut_png,
        "TIFF": _cut_tiff,
        "WEBP": _cut_webp,
    }
)
