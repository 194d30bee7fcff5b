"""An origin that serves pictures well, late, or not at all, and what a client should hear of each fault."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from ..media.origin import Exchange, Handler, Origin, redirect

__all__ = ["BAD", "GOOD", "Gallery"]

_DRIPS = 5
_DRIP_S = 0.1

#: Paths that give no picture, and what the error says of them. ``Origin`` has them.
BAD: Mapping[str, str] = MappingProxyType(
    {
        "/404": "its URL answered 404",
        "/403": "its URL answered 403",
        "/500": "its URL answered 500",
        "/206": "its URL answered 206",
        "/html": "not a picture of an accepted format",
        "/empty": "no picture: 0 bytes",
        "/reset": "its URL gave no complete answer",
        "/no-http": "its URL gave no complete answer",
        "/silent": "its URL did not finish within 3 s",
        "/drip": "its URL did not finish within 3 s",
        "/endless": "more bytes than max_image_bytes=1048576",
        "/too-long": "99999999999 bytes, more than max_image_bytes=1048576",
        "/lying-short": "",  # how much of it came along decides what is wrong with it
        "/lying-long": "its URL gave no complete answer",
        "/gzip-bomb": "its URL answered compressed",
        "/loop": "its URL redirects more than max_redirects=3 times",
        "/to-file": "its URL redirects to what is neither http nor https",
        "/to-nothing": "its URL names no host",
        "/to-garbage": "its URL is not a legal one",
    }
)


def _plain(data: bytes) -> Handler:
    async def answer(exchange: Exchange) -> None:
        await exchange.answer(data, "200 OK", "Content-Type: image/png")

    return answer


def _mislabelled(data: bytes) -> Handler:
    async def answer(exchange: Exchange) -> None:
        await exchange.answer(data, "200 OK", "Content-Type: text/html; charset=latin-1")

    return answer


def _dripping(data: bytes) -> Handler:
    """Piece by piece, and yet in time."""

    async def answer(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data))
        size = -(-len(data) // _DRIPS)
        for begin in range(0, len(data), size):
            await asyncio.sleep(_DRIP_S)
            await exchange.send(data[begin : begin + size])

    return answer


#: How a picture may be served and still be seen, by name.
GOOD: Mapping[str, Callable[[bytes], Handler]] = MappingProxyType(
    {
        "plain": _plain,
        "mislabelled": _mislabelled,
        "dripping": _dripping,
        "redirected": _plain,
        "under a name": _plain,
    }
)


class Gallery:
    """Hangs pictures up at an origin, for a while."""

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self._numbers = itertools.count(1)

    @contextlib.contextmanager
    def hung(self, data: bytes, manner: str) -> Iterator[str]:
        """The URL at which the picture ``data`` is, in this manner of ``GOOD``."""
        path = f"/picture/{next(self._numbers)}"
        routes = {path: GOOD[manner](data)}
        if manner == "redirected":
            routes |= {f"{path}/moved": redirect(path), f"{path}/away": redirect(f"{path}/moved")}
        self.origin.routes |= routes
        try:
            yield self.origin.url([*routes][-1], "localhost" if manner == "under a name" else None)
        finally:
            for one in routes:
                del self.origin.routes[one]
