"""Pictures that lie: files that Pillow wrote, flipped, cut off, spliced, with other numbers in them."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import PIL.Image
from hypothesis import strategies as st

__all__ = ["CORPUS", "damaged"]

_SIZE = (24, 16)


def _gradient(mode: str) -> PIL.Image.Image:
    grey = PIL.Image.linear_gradient("L").resize(_SIZE)
    return PIL.Image.merge("RGBA", (grey, grey.rotate(90), grey.rotate(180), grey)).convert(mode)


def _saved(mode: str, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    _gradient(mode).save(file, format, **options)
    return file.getvalue()


def _turned() -> PIL.Image.Exif:
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    return exif


def _frames(format: str, **options: Any) -> bytes:
    return _saved(
        "RGB", format, save_all=True, append_images=[_gradient("RGB").rotate(90), _gradient("L")], **options
    )


#: One file of each kind that the reader of pictures tells apart.
CORPUS: Mapping[str, bytes] = MappingProxyType(
    {
        "BMP": _saved("RGB", "BMP"),
        "BMP of a palette": _saved("P", "BMP"),
        "GIF": _saved("P", "GIF"),
        "GIF of frames": _frames("GIF"),
        "JPEG": _saved("RGB", "JPEG", exif=_turned()),
        "JPEG, progressive": _saved("RGB", "JPEG", progressive=True),
        "JPEG of inks": _saved("CMYK", "JPEG"),
        "JPEG of frames": _frames("MPO"),
        "PNG": _saved("RGBA", "PNG", exif=_turned()),
        "PNG of 16 bits": _saved("I;16", "PNG"),
        "PNG of a palette": _saved("P", "PNG", transparency=0),
        "PNG of frames": _frames("PNG"),
        "TIFF": _saved("RGB", "TIFF", exif=_turned()),
        "TIFF, deflate": _saved("RGB", "TIFF", compression="tiff_adobe_deflate"),
        "TIFF, fax": _saved("1", "TIFF", compression="group4"),
        "TIFF, JPEG": _saved("YCbCr", "TIFF", compression="jpeg"),
        "TIFF, LZW": _saved("RGB", "TIFF", compression="tiff_lzw"),
        "TIFF, PackBits": _saved("L", "TIFF", compression="packbits"),
        "TIFF of pages": _frames("TIFF"),
        "WebP": _saved("RGB", "WEBP", exif=_turned()),
        "WebP, lossless": _saved("RGBA", "WEBP", lossless=True),
        "WebP of frames": _frames("WEBP"),
    }
)

# Sizes that overflow, vanish, turn negative, or lie just within a bound.
_NUMBERS = [0, 1, 2, 255, 1023, 1024, 2**14, 2**15 - 1, 2**15, 2**16 - 1, 2**20, 2**31 - 1, 2**31, 2**32 - 1]
_FORMS = ["<H", ">H", "<I", ">I", ">B"]


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A file of ``CORPUS``, damaged in up to four ways; now and then as it is."""
    data = draw(st.sampled_from(sorted(CORPUS)).map(CORPUS.__getitem__))
    for _ in range(draw(st.integers(0, 4))):
        data = draw(_DAMAGES)(draw, data)
    return data if draw(st.integers(0, 4)) == 0 else _resealed(data)


def _flipped(draw: st.DrawFn, data: bytes) -> bytes:
    place = draw(_place(data))
    return (
        data[:place]
        + bytes(byte ^ draw(st.integers(1, 255)) for byte in data[place : place + 1])
        + data[place + 1 :]
    )


def _renumbered(draw: st.DrawFn, data: bytes) -> bytes:
    return _with_number(draw, data, draw(_place(data)), draw(st.sampled_from(_FORMS)))


def _resized(draw: st.DrawFn, data: bytes) -> bytes:
    """Another number where the picture's width or height is; WebP writes them less one."""
    form = draw(st.sampled_from(_FORMS))
    true = struct.pack(form, draw(st.sampled_from(_SIZE)) - draw(st.sampled_from([0, 0, 1])))
    places = [place for place in range(len(data)) if data.startswith(true, place)]
    return _with_number(draw, data, draw(st.sampled_from(places)), form) if places else data


def _with_number(draw: st.DrawFn, data: bytes, place: int, form: str) -> bytes:
    width = struct.calcsize(form)
    number = draw(st.sampled_from(_NUMBERS) | st.integers(0, 2**16)) & (256**width - 1)
    return data[:place] + struct.pack(form, number) + data[place + width :]


def _cut(draw: st.DrawFn, data: bytes) -> bytes:
    return data[: draw(_place(data))]


def _without(draw: st.DrawFn, data: bytes) -> bytes:
    start = draw(_place(data))
    return data[:start] + data[start + draw(st.integers(1, 64)) :]


def _repeated(draw: st.DrawFn, data: bytes) -> bytes:
    start = draw(_place(data))
    piece = data[start : start + draw(st.integers(1, 64))]
    return data[:start] + piece * draw(st.sampled_from([1, 2, 50, 1000])) + data[start:]


def _spliced(draw: st.DrawFn, data: bytes) -> bytes:
    """The beginning of one file and the end of another, or one within the other."""
    other = draw(st.sampled_from(sorted(CORPUS)).map(CORPUS.__getitem__))
    start = draw(_place(data))
    return data[:start] + other[draw(_place(other)) :] + (data[start:] if draw(st.booleans()) else b"")


_DAMAGES = st.sampled_from(
    [_flipped, _flipped, _renumbered, _resized, _resized, _resized, _cut, _without, _repeated, _spliced]
)


def _place(data: bytes) -> st.SearchStrategy[int]:
    """Mostly in what says sizes: the beginning, behind the signature, and a TIFF's end."""
    first, last = min(4, len(data)), len(data)
    return st.one_of(
        st.integers(first, min(64, last)), st.integers(max(first, last - 200), last), st.integers(0, last)
    )


def _resealed(data: bytes) -> bytes:
    """A PNG's chunks with the sums that they should have, so that damage gets past them."""
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        return data
    sealed, start = bytearray(data), 8
    while start + 12 <= len(data):
        end = start + 8 + int.from_bytes(data[start : start + 4], "big")
        if end + 4 > len(data):
            break
        sealed[end : end + 4] = zlib.crc32(data[start + 4 : end]).to_bytes(4, "big")
        start = end + 4
    return bytes(sealed)
