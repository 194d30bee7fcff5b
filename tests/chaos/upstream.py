"""An upstream that dies and returns: a server of its own process, behind a relay that can be rude.

To a proxy a relay that refuses or resets is a dead server, and what stands behind it is back at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from socket import SO_LINGER, SOL_SOCKET

__all__ = ["Relay", "Trouble", "reset"]


@dataclass
class Trouble:
    """Something that was wrong for a while; ``ended_s`` is infinite while it still is."""

    kind: str
    began_s: float
    ended_s: float = float("inf")

    def touches(self, began_s: float, ended_s: float) -> bool:
        """Whether it was wrong at any moment between these."""
        return self.began_s <= ended_s and began_s <= self.ended_s


class Relay:
    """A loopback port in front of another one.

    Of each connection the seed says whether it is served, refused, or reset after some bytes of its answers;
    ``share`` is that of the bad ones. What it does to anybody is put into ``troubles``.
    """

    def __init__(self, seed: str, *, share: float) -> None:
        self.troubles: list[Trouble] = []
        self.share = share
        self.target = 0  # the port behind; 0: nobody is there
        self.port = 0
        self._rng = random.Random(seed)
        self._links: set[asyncio.Task[None]] = set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._links.add(task)
        fate = self._rng.choice(("refuse", "reset", "linger")) if self._rng.random() < self.share else ""
        most = self._rng.randrange(1, 1200) if fate == "reset" else None
        try:
            if fate == "refuse" or not self.target:
                raise ConnectionError
            if fate == "linger":
                await asyncio.sleep(0.3)
            await self._link(reader, writer, most)
        except (ConnectionError, asyncio.CancelledError):
            self.troubles.append(Trouble(fate or "away", time.monotonic(), time.monotonic()))
            reset(writer)
        finally:
            self._links.discard(task)
            writer.close()

    async def _link(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, most: int | None
    ) -> None:
        """Carry bytes both ways until the client is done.

        ``ConnectionError`` after ``most`` bytes back, or if the server is done first, as it is when it dies.
        """
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.target)
        up = asyncio.ensure_future(_carry(reader, there_writer))
        down = asyncio.ensure_future(_carry(there_reader, writer, most))
        try:
            done, _ = await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()
            if up not in done:
                raise ConnectionError("the server closed it")
        finally:
            for one in (up, down):
                one.cancel()
            await asyncio.wait({up, down})
            there_writer.close()

    async def drop(self) -> None:
        """Reset every connection that there is."""
        for link in self._links:
            link.cancel()
        if self._links:
            await asyncio.wait(self._links)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Relay]:
        """Listen, for the length of the ``async with``."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            await self.drop()
            await server.wait_closed()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, most: int | None = None) -> None:
    while data := await reader.read(65536):
        if most is not None:
            data, most = data[:most], most - len(data)
        writer.write(data)
        await writer.drain()
        if most is not None and most <= 0:
            raise ConnectionError("enough")


def reset(writer: asyncio.StreamWriter) -> None:
    """End the connection by an RST, if it has not ended."""
    if not writer.is_closing():
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, linger)
        writer.transport.abort()
