"""Data URLs: one documented answer for each spelling, and sizes known before anything is decoded."""

from __future__ import annotations

import base64
import contextlib
import tracemalloc
from urllib.parse import quote, quote_from_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retinue.errors import InvalidInput
from retinue.media import MediaLoader
from retinue.media.data_url import parse, size_bound

from .origin import picture

MIB = 2**20


def png() -> bytes:
    """A picture whose base64 has both characters outside the alphanumerics, and padding."""
    for red in range(256):
        data = picture(colour=f"rgb({red}, 7, 9)", size=(40, 30)) + b"\xfb\xff\xfe"
        text = base64.b64encode(data).decode()
        if "+" in text and "/" in text and text.endswith("="):
            return data
    raise AssertionError("no such picture")


PNG = png()
TEXT = base64.b64encode(PNG).decode()
LINES = [TEXT[start : start + 76] for start in range(0, len(TEXT), 76)]

ACCEPTED = {
    "canonical": f"data:image/png;base64,{TEXT}",
    "upper case": f"DATA:IMAGE/PNG;BASE64,{TEXT}",
    "another parameter": f"data:image/png;charset=utf-8;base64,{TEXT}",
    "parameters after": f"data:image/png;base64;charset=utf-8,{TEXT}",
    "spaces around the flag": f"data:image/png; base64 ,{TEXT}",
    "punctuated subtype": f"data:image/x-icon;base64,{TEXT}",
    "structured subtype": f"data:image/vnd.some-thing+x;base64,{TEXT}",
    "image/jpg": f"data:image/jpg;base64,{TEXT}",
    "jpeg label on a PNG": f"data:image/jpeg;base64,{TEXT}",
    "label of another kind": f"data:application/octet-stream;base64,{TEXT}",
    "no media type": f"data:;base64,{TEXT}",
    "newlines": f"data:image/png;base64,{chr(10).join(LINES)}",
    "CRLF and the last too": "data:image/png;base64,\r\n" + "".join(line + "\r\n" for line in LINES),
    "spaces and tabs": "data:image/png;base64, " + "\t ".join(LINES),
    "escaped newlines": "data:image/png;base64," + "%0A".join(LINES),
    "leading space": f"  data:image/png;base64,{TEXT}",
    "trailing newline": f"data:image/png;base64,{TEXT}\n",
    "URL-safe": f"data:image/png;base64,{base64.urlsafe_b64encode(PNG).decode()}",
    "padding left out": f"data:image/png;base64,{TEXT.rstrip('=')}",
    "URL-safe without padding": f"data:image/png;base64,{base64.urlsafe_b64encode(PNG).decode().rstrip('=')}",
    "escapes": f"data:image/png;base64,{quote(TEXT, safe='')}",
    "lower-case escapes": f"data:image/png;base64,{TEXT.replace('+', '%2b').replace('/', '%2f')}",
    "escaped throughout": "data:image/png;base64," + "".join(f"%{ord(c):02X}" for c in TEXT),
    "not base64": f"data:image/png,{quote_from_bytes(PNG)}",
    "fragment": f"data:image/png;base64,{TEXT}#x",
}


@pytest.mark.parametrize("spelling", ACCEPTED)
async def test_a_legal_spelling_gives_the_same_bytes(spelling: str) -> None:
    held: list[int] = []
    async with MediaLoader() as loader:
        (image,) = await loader.load([ACCEPTED[spelling]], reserve=held.append)
    assert len(held) == 1
    assert held[0] >= len(PNG)
    assert (image.format, image.size) == ("PNG", (40, 30))
    assert image.data == PNG
    assert image.url is None


REFUSED = {
    "no comma": ("data:image/png;base64", "without a comma in its first 1024 characters"),
    "a header that does not end": ("data:" + ";a=b" * 1000 + f";base64,{TEXT}", "without a comma"),
    "not base64": (f"data:;base64,{TEXT[:40]}!{TEXT[41:]}", "characters that are not base64"),
    "padding within": (f"data:;base64,{TEXT[:40]}={TEXT[41:]}", "characters that are not base64"),
    "too much padding": (f"data:;base64,{TEXT}=", "cut off or wrongly padded"),
    "one character too many": ("data:;base64,QUJDR", "cut off or wrongly padded"),
    "beyond ASCII": (f"data:;base64,{TEXT}é", "outside ASCII"),
    "a surrogate": (f"data:;base64,{TEXT}\ud800", "outside ASCII"),
    "a broken escape": (f"data:;base64,{TEXT}%2", "% that no two hexadecimal digits follow"),
    "a percent sign": ("data:image/png,100%zz", "% that no two hexadecimal digits follow"),
    "empty": ("data:image/png;base64,", "no picture: 0 bytes"),
    "nothing but a comma": ("data:,", "no picture: 0 bytes"),
    "SVG": ("data:image/svg+xml,%3Csvg/%3E", "not a picture of an accepted format"),
    "without its prefix": (
        TEXT,
        "is no data, http or https URL .base64 alone needs 'data:;base64,'",
    ),
}


@pytest.mark.parametrize("spelling", REFUSED)
async def test_an_illegal_spelling_is_refused_by_what_is_wrong_with_it(spelling: str) -> None:
    url, message = REFUSED[spelling]
    async with MediaLoader() as loader:
        with pytest.raises(InvalidInput, match=f"image 1 of 1: .*{message}") as caught:
            await loader.load([url])
    assert caught.value.position == 0
    assert len(str(caught.value)) < 200


# -- sizes ---------------------------------------------------------------------------------------------


@given(st.binary(max_size=200), st.booleans(), st.booleans(), st.sampled_from(["", "\n", "%0a", " \r\n\t"]))
def test_the_size_is_what_read_gives(data: bytes, padded: bool, safe: bool, between: str) -> None:
    text = (base64.urlsafe_b64encode if safe else base64.b64encode)(data).decode()
    text = between.join(text if padded else text.rstrip("="))
    for url in (f"data:;base64,{text}", f"data:,{quote_from_bytes(data)}"):
        parsed = parse(url, max_bytes=len(data) or 1)
        assert parsed.read() == data
        assert parsed.size == len(data)
        assert size_bound(url) >= parsed.size


@given(st.binary(max_size=200))
def test_the_bound_by_length_alone_is_the_size_where_nothing_but_base64_is_sent(data: bytes) -> None:
    assert size_bound(f"data:;base64,{base64.b64encode(data).decode()}") == len(data)


@pytest.mark.parametrize("between", ["", "\n", "%0A"])
def test_the_bound_is_on_the_bytes_and_not_on_their_spelling(between: str) -> None:
    url = "data:;base64," + between.join(TEXT)
    assert parse(url, max_bytes=len(PNG)).size == len(PNG)
    with pytest.raises(InvalidInput, match=f"{len(PNG)} bytes, more than max_image_bytes={len(PNG) - 1}"):
        parse(url, max_bytes=len(PNG) - 1)


def test_what_is_too_large_is_not_decoded() -> None:
    """Not a character of this is base64: only the length can be what it is refused for."""
    with pytest.raises(InvalidInput, match="more than max_image_bytes"):
        parse("data:;base64," + "!" * 4000, max_bytes=2999)


@pytest.mark.parametrize(
    "text", ["%41" * 2 * MIB, "A\n" * 3 * MIB, ";" * 6 * MIB], ids=["escapes", "lines", "flags"]
)
def test_a_spelling_costs_a_few_times_its_length_and_not_an_object_per_character(text: str) -> None:
    url = f"data:;base64,{text}" if text[0] != ";" else f"data:{text}"
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput):
            parse(url, max_bytes=1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * len(url)


@given(st.text())
def test_any_text_has_an_answer(text: str) -> None:
    bound = size_bound(f"data:{text}")
    with contextlib.suppress(InvalidInput):
        assert len(parse(f"data:{text}", max_bytes=100).read()) <= min(bound, 100)
