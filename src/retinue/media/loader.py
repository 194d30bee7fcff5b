"""The ``image_url`` strings of one request to verified images.

Thread rules
    ``load`` may be called from any event loop, from several at once. ``_lock`` guards ``_pool`` and
    ``_closed``. Decoding and verifying run on the pool's threads; ``reserve`` runs on the caller's loop.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial

from aiohttp.abc import AbstractResolver

from retinue.encoder.pool import Pool
from retinue.errors import EncoderUnavailable, InvalidInput
from retinue.media import data_url, file_url
from retinue.media.addresses import Address, is_public
from retinue.media.fetch import Fetcher
from retinue.media.image import Image
from retinue.media.policy import MediaPolicy

__all__ = ["MediaLoader"]

# Milliseconds of work per image, most of it in C; more threads would take the cores from the encoder's.
_MAX_THREADS = 4
_GRACE_S = 1.0  # for a file system that hangs, once the interpreter exits
_AROUND = "".join(map(chr, range(0x21)))  # white space and controls, which URL parsers drop at both ends
_SHOWN = 30


class MediaLoader:
    """Turns data, http, https and file URLs into verified ``Image`` objects, within ``policy``.

    Creating it does nothing. Its connections and threads are made as they are first needed and live until
    ``aclose``, which ``async with`` calls. ``resolver`` looks host names up; ``is_public`` says which
    addresses ``allow_private_addresses`` is not needed for.
    """

    def __init__(
        self,
        policy: MediaPolicy | None = None,
        *,
        resolver: AbstractResolver | None = None,
        is_public: Callable[[Address], bool] = is_public,
    ) -> None:
        self._policy = policy or MediaPolicy()
        self._fetcher = Fetcher(self._policy, resolver=resolver, is_public=is_public)
        self._lock = threading.Lock()
        self._pool: Pool | None = None
        self._closed = False

    async def __aenter__(self) -> MediaLoader:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the connections and threads. Loads under way, and later ones, get ``EncoderUnavailable``.

        Call it on the event loop of the first load, for the connections are that loop's; any number of times.
        """
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
        await self._fetcher.aclose()

    async def load(self, urls: Sequence[str], *, reserve: Callable[[int], None] | None = None) -> list[Image]:
        """Load all of ``urls`` concurrently; return their images in order, fetching equal ones once.

        The first failure cancels the others, and is raised when they have ended. ``reserve`` is called with
        each number of bytes before they are held: at once for a file and for a data URL, which may turn out
        to hold less; piece by piece for a response. What it raises, ``Overloaded`` as a rule, ends the load
        and passes through.

        Raises ``InvalidInput`` for more than ``max_images`` before any of them is looked at, and for a URL
        that is not accepted, cannot be fetched or is no picture: "image 2 of 3: its URL answered 404", with
        ``position`` 1. Raises ``EncoderUnavailable`` after ``aclose``.
        """
        if isinstance(urls, str):
            raise TypeError("load() takes a sequence of URLs, got one str")
        count, most = len(urls), self._policy.max_images
        if count > most:
            raise InvalidInput(f"{count} images, more than max_images={most}")
        self._check_open()
        if count == 1 and urls[0].startswith("data:"):  # which the event loop is done with at once
            try:
                return [await self._load(urls[0], reserve)]
            except Exception as error:
                failed = self._first([error])
            finally:
                del urls  # a traceback through here must not keep them
            raise failed
        tasks = {url: asyncio.ensure_future(self._load(url, reserve)) for url in dict.fromkeys(urls)}
        await _end(tasks.values())
        if all(_succeeded(task) for task in tasks.values()):
            return [tasks[url].result() for url in urls]
        errors = [None if tasks[url].cancelled() else tasks[url].exception() for url in urls]
        del tasks, urls
        raise self._first(errors)

    # ---- within

    async def _load(self, url: str, reserve: Callable[[int], None] | None) -> Image:
        keep = reserve or _keep_all
        text = url.strip(_AROUND)
        scheme = text[:_SHOWN].partition(":")[0].lower() if ":" in text[:_SHOWN] else ""
        read: Callable[[], bytes]
        if scheme == "data":
            keep(data_url.size_bound(text))
            read, url = partial(self._decode, text), ""
        elif scheme == "file":
            root, most = self._policy.file_root, self._policy.max_image_bytes
            file = await self._threads().call(partial(file_url.find, text, root=root, max_bytes=most))
            keep(file.size)
            read = file.read
        elif scheme in ("http", "https"):
            read = partial(bytes, await self._fetcher.fetch(text, keep=keep))
        else:
            raise InvalidInput(_unsupported(text, scheme))
        return await self._threads().call(partial(self._verified, read, url or None))

    def _decode(self, text: str) -> bytes:
        return data_url.parse(text, max_bytes=self._policy.max_image_bytes).read()

    def _verified(self, read: Callable[[], bytes], url: str | None) -> Image:
        return Image(read(), url=url, max_pixels=self._policy.max_image_pixels)

    def _threads(self) -> Pool:
        with self._lock:
            if self._closed:
                raise EncoderUnavailable("the media loader is closed")
            if self._pool is None:
                pool = Pool(min(_MAX_THREADS, os.cpu_count() or 1), "retinue-media", grace_s=_GRACE_S)
                pool.start()
                self._pool = pool
            return self._pool

    def _check_open(self) -> None:
        if self._closed:
            raise EncoderUnavailable("the media loader is closed")

    def _first(self, errors: Sequence[BaseException | None]) -> BaseException:
        """The error to raise for these, of which those that are None succeeded or were cancelled."""
        position, error = next(((n, error) for n, error in enumerate(errors) if error), (0, None))
        if self._closed or error is None:  # None: cancelled, but by neither a sibling nor the caller
            return EncoderUnavailable("the media loader was closed during the load")
        if not isinstance(error, InvalidInput):
            return error
        return InvalidInput(f"image {position + 1} of {len(errors)}: {error}", position=position)


async def _end(tasks: Collection[asyncio.Task[Image]]) -> None:
    """Wait for all; the first that fails, or who leaves, cancels the others, and waits for their end too."""
    for task in tasks:
        task.add_done_callback(_see)
    try:
        if tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        running = [task for task in tasks if not task.done()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)


def _see(task: asyncio.Task[Image]) -> None:
    """Look at the error, if any, which the event loop would otherwise log as never retrieved."""
    if not task.cancelled():
        task.exception()


def _succeeded(task: asyncio.Task[Image]) -> bool:
    return not task.cancelled() and task.exception() is None


def _keep_all(_: int) -> None:
    pass


def _unsupported(text: str, scheme: str) -> str:
    shown = repr(text[:_SHOWN]) + ("..." if len(text) > _SHOWN else "")
    hint = "" if scheme else " (base64 alone needs 'data:;base64,' before it)"
    return f"{shown} is no data, http or https URL{hint}"
