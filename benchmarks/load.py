"""Closed-loop HTTP clients that cost next to nothing: ``python -m benchmarks.load URL CLIENTS``.

Reads a JSON list of bodies, then a number of turns per line; after each it writes the seconds that it took.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Sequence

PATH = "/v1/chat/completions"


class Client:
    """One connection, and the requests that it sends in turn."""

    def __init__(self, requests: Sequence[bytes]) -> None:
        self._requests = requests
        self._sent = 0

    async def connect(self, host: str, port: int) -> None:
        """Open the connection."""
        self._reader, self._writer = await asyncio.open_connection(host, port)

    async def run(self, turns: int) -> None:
        """Send so many requests, each when the one before it is answered."""
        for _ in range(turns):
            self._writer.write(self._requests[self._sent % len(self._requests)])
            self._sent += 1
            head = await self._reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
            assert length, head
            await self._reader.readexactly(int(length[1]))


async def main() -> None:
    host, port = sys.argv[1].removeprefix("http://").split(":")
    count = int(sys.argv[2])
    bodies = [body.encode() for body in json.loads(sys.stdin.readline())]
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
    requests = [head.encode() + b"%d\r\n\r\n" % len(body) + body for body in bodies]
    clients = [
        Client([requests[(number + n) % len(requests)] for n in range(len(requests))])
        for number in range(count)
    ]
    for client in clients:
        await client.connect(host, int(port))
    while line := await asyncio.to_thread(sys.stdin.readline):
        began_s = time.perf_counter()
        await asyncio.gather(*(client.run(int(line)) for client in clients))
        print(time.perf_counter() - began_s, flush=True)


if __name__ == "__main__":
    asyncio.run(main())
