"""Image URLs: data URLs in legal and illegal spellings, and URLs of places where nobody may go."""

from __future__ import annotations

import pybase64
from hypothesis import strategies as st

from .pictures import CORPUS, damaged

__all__ = ["PICTURE", "data_urls", "forbidden_urls"]

#: A data URL of a picture that is as it should be.
PICTURE = "data:image/png;base64," + pybase64.b64encode(CORPUS["PNG"]).decode()

_HEADS = [
    "data:image/png;base64,",
    "data:;base64,",
    "DATA:IMAGE/JPEG;Charset=utf-8;BASE64,",
    "data:image/png;base64;name=x,",
    "data:base64,",
    "data:x;base64=,",
    "data:;base64;x=,",
    "data:,",
    "data:image/png;base64",
    "data:" + "x" * 1100 + ";base64,",
    " \n data:;base64,",
    "data :;base64,",
]
_JUNK = ["", *"=%-_#, \n\0é\ud800", "==", "===", "%4", "%41", "%3D", "A" * 99]


@st.composite
def data_urls(draw: st.DrawFn) -> str:
    """Mostly of a picture, damaged or not, in base64 or percent escapes, with junk somewhere in it."""
    data = draw(damaged() | st.binary(max_size=40) | st.just(CORPUS["PNG"]))
    payload = draw(st.sampled_from([_base64, _base64, _url_safe, _unpadded, _escaped]))(data)
    url = draw(st.sampled_from(_HEADS[:2]) | st.sampled_from(_HEADS)) + payload
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        place = draw(st.integers(0, len(url)))
        url = url[:place] + draw(st.sampled_from(_JUNK)) + url[place:]
    return url


def _base64(data: bytes) -> str:
    return pybase64.b64encode(data).decode()


def _url_safe(data: bytes) -> str:
    return pybase64.urlsafe_b64encode(data).decode()


def _unpadded(data: bytes) -> str:
    return _base64(data).rstrip("=")


def _escaped(data: bytes) -> str:
    return "".join(f"%{byte:02x}" for byte in data)


def forbidden_urls(port: int) -> st.SearchStrategy[str]:
    """URLs that must not be followed; somebody listens on ``port`` of the loopback interface."""
    hosts = [
        "127.0.0.1",
        "127.1",
        "2130706433",
        "0x7f.0.0.1",
        "017700000001",
        "0",
        "localhost",
        "LOCALHOST.",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]",
        "a@127.0.0.1",
        "127.0.0.1%00",
        "127.0.0.1\\@x",
        "１２７.0.0.1",  # noqa: RUF001  # digits that are none in ASCII
        "127。0。0。1",
    ]
    urls = st.builds(
        "{}://{}:{}/{}".format,
        st.sampled_from(["http", "https", "HTTP", "ftp", "gopher", "ws"]),
        st.sampled_from(hosts),
        st.just(port),
        st.text(max_size=8),
    )
    files = st.sampled_from(
        ["file:///etc/passwd", "file://localhost/etc/passwd", "file:/proc/self/environ", "/etc/passwd", "x"]
    )
    return urls | urls | urls | files | st.text(max_size=20)
