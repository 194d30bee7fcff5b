"""Closed-loop HTTP clients that time each request: ``python -m benchmarks.clients URL BODY CLIENTS``.

Reads a number of turns per line; after each it writes, as JSON, the latencies of all requests and how long
they took together, in seconds.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from itertools import chain
from urllib.parse import urlsplit


class Client:
    """One connection, and the request that it sends again and again."""

    def __init__(self, request: bytes) -> None:
        self.request = request

    async def connect(self, host: str, port: int) -> None:
        """Open the connection."""
        self._address = host, port
        self._reader, self._writer = await asyncio.open_connection(host, port)

    async def ask(self) -> None:
        """Send it and read the answer, whose length is told first or which comes in chunks.

        A connection that was closed between two requests is opened again.
        """
        self._writer.write(self.request)
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise
            await self.connect(*self._address)
            self._writer.write(self.request)
            head = await self._reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        if length:
            await self._reader.readexactly(int(length[1]))
        else:
            await self._reader.readuntil(b"\r\n0\r\n\r\n")

    async def run(self, turns: int) -> list[float]:
        """Ask so many times, each when the one before it is answered; return the latencies."""
        latencies_s = []
        for _ in range(turns):
            began_s = time.perf_counter()
            await self.ask()
            latencies_s.append(time.perf_counter() - began_s)
        return latencies_s


async def main() -> None:
    url, body = urlsplit(sys.argv[1]), sys.argv[2].encode()
    head = f"POST {url.path} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
    request = head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body
    clients = [Client(request) for _ in range(int(sys.argv[3]))]
    for client in clients:
        await client.connect(url.hostname or "", url.port or 80)

    while line := await asyncio.to_thread(sys.stdin.readline):
        began_s = time.perf_counter()
        of_each = await asyncio.gather(*(client.run(int(line)) for client in clients))
        seconds = time.perf_counter() - began_s
        print(json.dumps([list(chain.from_iterable(of_each)), seconds]), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
