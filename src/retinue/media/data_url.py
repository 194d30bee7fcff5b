"""Data URLs (RFC 2397), in every spelling that clients really send. Pure: no I/O, no state."""

from __future__ import annotations

import binascii
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import unquote_to_bytes

import pybase64

from retinue.errors import InvalidInput

__all__ = ["DataURL", "parse", "size_bound"]

_MAX_HEADER = 1024  # characters; real ones are below 100
_SPACE = b" \t\n\f\r"
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_BROKEN_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_SLICE = 2**16


@dataclass(frozen=True)
class DataURL:
    """The payload of a data URL before its decoding; ``read`` gives ``size`` bytes, or ``InvalidInput``."""

    size: int
    read: Callable[[], bytes] = field(repr=False)


def size_bound(url: str) -> int:
    """The most bytes that ``parse`` may find in ``url``, by its length alone."""
    comma = url.find(",", 0, _MAX_HEADER)
    length = len(url) - comma - 1
    if "base64" in _flags(url, comma):
        return max(0, length - url[-2:].count("=")) * 3 // 4
    return length


def parse(url: str, *, max_bytes: int) -> DataURL:
    """Read the header of ``url`` and measure its payload; decode nothing yet.

    Accepted, with the same bytes for each:
        any case of ``data:`` and ``base64``; any media type or none, for it is not believed;
        other parameters, ``base64`` standing before, between or after them;
        white space within the base64, percent escapes (``%2B``), the URL-safe alphabet, padding left out;
        a payload of percent escapes without base64; ``#fragment`` at the end, which is cut off.

    ``InvalidInput`` for no comma, an escape that is none, characters outside ASCII or the alphabet, wrong
    padding, and more than ``max_bytes``. The last is known before anything is decoded, from the length alone.
    Base64 without ``data:`` before it is no URL, and not for this function.
    """
    comma = url.find(",", 0, _MAX_HEADER)
    if comma < 0:
        raise InvalidInput(f"a data URL without a comma in its first {_MAX_HEADER} characters")
    flags = _flags(url, comma)
    fragment = url.find("#", comma)
    try:
        payload = url[comma + 1 : fragment if fragment >= 0 else None].encode("ascii")
    except UnicodeEncodeError:
        payload = None
    if payload is None:
        raise InvalidInput("a data URL with characters outside ASCII")
    if b"%" in payload and _BROKEN_ESCAPE.search(payload):  # the first takes no time
        raise InvalidInput("a data URL with a % that no two hexadecimal digits follow")
    parsed = _base64(payload) if "base64" in flags else _escaped(payload)
    if parsed.size > max_bytes:
        raise InvalidInput(f"{parsed.size} bytes, more than max_image_bytes={max_bytes}")
    return parsed


def _flags(url: str, comma: int) -> set[str]:
    """What stands between semicolons before the comma, in lower case; ``comma`` is -1 if there is none."""
    return {flag.strip().lower() for flag in url[: max(0, comma)].split(";")[1:]}


def _base64(payload: bytes) -> DataURL:
    if b"%" in payload:
        payload = _unescaped(payload)
    if any(space in payload for space in _SPACE):
        payload = payload.translate(None, _SPACE)
    if b"-" in payload or b"_" in payload:
        payload = payload.translate(_URL_SAFE)
    digits = len(payload.rstrip(b"="))
    padding = -digits % 4
    if padding == 3 or len(payload) - digits not in (0, padding):
        raise InvalidInput("a data URL whose base64 is cut off or wrongly padded")
    payload = payload.ljust(digits + padding, b"=")
    return DataURL(digits * 3 // 4, partial(_decoded, payload))


def _decoded(payload: bytes) -> bytes:
    try:
        return pybase64.b64decode(payload, validate=True)
    except binascii.Error:
        pass
    raise InvalidInput("a data URL with characters that are not base64")


def _escaped(payload: bytes) -> DataURL:
    payload = payload.translate(None, b"\t\n\r")  # as every URL parser does; a space may be data
    return DataURL(len(payload) - 2 * payload.count(b"%"), partial(_unescaped, payload))


def _unescaped(payload: bytes) -> bytes:
    """Slice by slice: ``unquote_to_bytes`` makes two objects of each escape, and there may be millions."""
    plain, start = bytearray(), 0
    while start < len(payload):
        end = start + _SLICE
        cut = payload.rfind(b"%", end - 2, end)
        end = cut + 3 if cut >= 0 else end
        plain += unquote_to_bytes(payload[start:end])
        start = end
    return bytes(plain)
