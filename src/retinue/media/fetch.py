"""http and https URLs to bytes, from addresses that the policy allows and no others.

Every socket is made by ``_dial``, which sees the address that is about to be connected to: whatever a name
resolved to, whichever redirect led there, however the address was spelled, no unchecked one is dialled.

Thread rules
    All methods may be called from any event loop; ``_lock`` guards ``_home``, ``_pooled``, ``_closed``.
    A session belongs to one loop. The pooled one is the first loop's; a fetch on another has one of its own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from importlib import metadata
from ipaddress import ip_address
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from retinue.errors import EncoderUnavailable, InvalidInput, RetinueError
from retinue.media.addresses import Address, canonical_host, is_public, is_within
from retinue.media.policy import MediaPolicy

__all__ = ["Fetcher", "ThreadResolver"]

_HEADERS = {"User-Agent": f"retinue/{metadata.version('retinue')}", "Accept-Encoding": "identity"}
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_COMPRESSIONS = frozenset({"br", "compress", "deflate", "gzip", "x-gzip", "zstd"})
# What needs no quoting is sent as it came: a signed URL may not survive being spelled anew.
_QUOTED = re.compile(r"(?:[\w!$&'()*+,;=:@/?#\[\].~-]|%[0-9A-Fa-f]{2})*", re.ASCII)


class _NotPublic(OSError):
    pass


class ThreadResolver(AbstractResolver):
    """``getaddrinfo``, in a daemon thread for each lookup.

    The event loop's default executor would do, but for its few threads: names whose servers never answer
    would keep them from all others, and from the interpreter's exit.
    """

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Look ``host`` up; ``OSError`` if it has no address."""
        found: concurrent.futures.Future[list[ResolveResult]] = concurrent.futures.Future()
        found.set_running_or_notify_cancel()  # so that who leaves cannot cancel what runs
        look_up = partial(self._look_up, found, host, port, family)
        try:
            threading.Thread(target=look_up, name="retinue-lookup", daemon=True).start()
        except RuntimeError as error:
            raise OSError("no thread to be had") from error
        return await asyncio.wrap_future(found)

    async def close(self) -> None:
        """Nothing to close."""

    def _look_up(
        self,
        found: concurrent.futures.Future[list[ResolveResult]],
        host: str,
        port: int,
        family: socket.AddressFamily,
    ) -> None:
        try:
            answers = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
        except UnicodeError:  # a label too long for the encoding of names
            found.set_exception(OSError("no legal name"))
        except Exception as error:
            found.set_exception(error)
        else:
            found.set_result(
                [
                    ResolveResult(
                        hostname=host,
                        host=str(address[0]),
                        port=port,
                        family=kind,
                        proto=protocol,
                        flags=socket.AI_NUMERICHOST,
                    )
                    for kind, _, protocol, _, address in answers
                ]
            )


class Fetcher:
    """Fetches http and https URLs within ``policy``; connections are kept for the next fetch.

    ``resolver`` looks names up; what it answers is checked like any other address, by ``is_public``.
    Nothing is opened before the first fetch. There is no limit on connections: slow origins, which hold
    theirs until ``fetch_timeout_s``, keep nobody from a fast one.
    """

    def __init__(
        self,
        policy: MediaPolicy,
        *,
        resolver: AbstractResolver | None = None,
        is_public: Callable[[Address], bool] = is_public,
    ) -> None:
        self._policy = policy
        self._resolver = resolver or ThreadResolver()
        self._is_public = is_public
        self._lock = threading.Lock()
        self._home: asyncio.AbstractEventLoop | None = None
        self._pooled: aiohttp.ClientSession | None = None
        self._closed = False

    async def fetch(self, url: str, *, keep: Callable[[int], None]) -> bytearray:
        """Return the body of ``url``; each piece of it is counted, and its length passed to ``keep``, first.

        ``InvalidInput`` for whatever goes wrong on the way, ``EncoderUnavailable`` after ``aclose``. What
        ``keep`` raises passes through.
        """
        timeout_s = self._policy.fetch_timeout_s
        try:
            return await asyncio.wait_for(self._follow(url, keep), timeout_s)
        except RetinueError:
            raise
        except asyncio.TimeoutError:
            problem = f"its URL did not finish within {timeout_s:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            problem = self._problem(error)
        raise InvalidInput(problem)  # out here, where it does not hold on to the other

    async def aclose(self) -> None:
        """Close the connections; ``RuntimeError`` on another event loop than theirs, while that is open."""
        with self._lock:
            session, home = self._pooled, self._home
            here = home is asyncio.get_running_loop()
            if home is not None and not here and not home.is_closed():
                raise RuntimeError("aclose() belongs on the event loop of the first fetch")
            self._home = self._pooled = None
            self._closed = True
        if session is not None and here:
            await session.close()

    # ---- within

    async def _follow(self, text: str, keep: Callable[[int], None]) -> bytearray:
        url = self._checked(_parse(text))
        async with self._session() as session:
            for _ in range(self._policy.max_redirects + 1):
                async with session.get(url, allow_redirects=False) as response:
                    location = response.headers.get("Location")
                    if response.status not in _REDIRECTS or location is None:
                        return await self._body(response, keep)
                    url = self._checked(url.join(_parse(location)))
        raise InvalidInput(f"its URL redirects more than max_redirects={self._policy.max_redirects} times")

    def _checked(self, url: URL) -> URL:
        """``url`` with its host in canonical form, if scheme and host are allowed."""
        if url.scheme not in ("http", "https"):
            raise InvalidInput("its URL redirects to what is neither http nor https")
        if not url.raw_host:
            raise InvalidInput("its URL names no host")
        host = canonical_host(url.raw_host)
        allowed = self._policy.allowed_domains
        if allowed and not is_within(host, allowed):
            raise InvalidInput("its URL's host is not among allowed_domains")
        return url.with_host(host)

    async def _body(self, response: aiohttp.ClientResponse, keep: Callable[[int], None]) -> bytearray:
        if response.status != 200:
            raise InvalidInput(f"its URL answered {response.status}")
        if response.headers.get("Content-Encoding", "").strip().lower() in _COMPRESSIONS:
            raise InvalidInput("its URL answered compressed, though asked not to")
        most = self._policy.max_image_bytes
        if (response.content_length or 0) > most:
            raise InvalidInput(f"{response.content_length} bytes, more than max_image_bytes={most}")
        body = bytearray()
        async for piece in response.content.iter_any():
            if len(body) + len(piece) > most:
                raise InvalidInput(f"more bytes than max_image_bytes={most}")
            keep(len(piece))
            body += piece
        return body

    @contextlib.asynccontextmanager
    async def _session(self) -> AsyncIterator[aiohttp.ClientSession]:
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._closed:
                raise EncoderUnavailable("the media loader is closed")
            if self._home is None or self._home.is_closed():
                self._home, self._pooled = loop, self._open()
            pooled = self._pooled if self._home is loop else None
        if pooled is not None:
            yield pooled
        else:
            async with self._open() as session:
                yield session

    def _open(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, family=socket.AF_UNSPEC, resolver=self._resolver, socket_factory=self._dial
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=_HEADERS,
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None),  # ours spans all redirects
        )

    def _dial(self, target: tuple[Any, ...]) -> socket.socket:
        """The socket for ``target``, as ``getaddrinfo`` describes it; it is connected to that alone."""
        family, kind, protocol, _, address = target
        if not self._policy.allow_private_addresses and not self._is_public(ip_address(address[0])):
            raise _NotPublic("not public")
        return socket.socket(family, kind, protocol)

    def _problem(self, error: Exception) -> str:
        """What the client may know of ``error``: nothing of who answers at which address in here."""
        unresolved = isinstance(error, aiohttp.ClientConnectorDNSError)
        if isinstance(error, aiohttp.ClientConnectorError):
            unresolved = unresolved or isinstance(error.os_error, _NotPublic)
        if unresolved and not self._policy.allow_private_addresses:
            # The same for both, or it would tell which names exist in here.
            return "its URL's host has no public address"
        if isinstance(error, aiohttp.ClientSSLError):
            return "its URL could not be reached over TLS"
        if isinstance(error, aiohttp.ClientConnectorError):
            return "its URL could not be reached"
        if isinstance(error, aiohttp.ClientError | OSError) and not isinstance(error, aiohttp.InvalidURL):
            return "its URL gave no complete answer"
        return "its URL is not a legal one"


def _parse(text: str) -> URL:
    return URL(text, encoded=_QUOTED.fullmatch(text) is not None)
