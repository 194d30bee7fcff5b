"""A server as a process of its own, which a test follows line by line."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from .asgi import SOON_S

PROGRAM = Path(__file__).with_name("program.py")

_START_S = 50.0  # seconds of work on its imports, where the cores are taken


class Process:
    """A process that serves, and says so as ``name``."""

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        self._process = process
        self._name = name
        self.port = 0

    async def line(self, pattern: str) -> re.Match[str]:
        """The next line, which must look like this."""
        assert self._process.stdout is not None
        line = (await asyncio.wait_for(self._process.stdout.readline(), _START_S)).decode().rstrip()
        match = re.fullmatch(pattern, line)
        assert match, line
        return match

    async def ready(self) -> None:
        """Let it come up."""
        await self.listening()
        if self._name == "program":
            await self.line(r"building")
        await self.line(rf"{self._name}: ready on .*/v1")

    async def listening(self) -> None:
        url = rf"{self._name}: listening on http://127.0.0.1:(\d+), building"
        self.port = int((await self.line(url))[1])

    def go(self) -> None:
        """Let it go on where it waits for a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")

    def signal(self, number: int = signal.SIGTERM) -> None:
        self._process.send_signal(number)

    async def end(self) -> int:
        """Its exit status."""
        return await asyncio.wait_for(self._process.wait(), SOON_S)

    async def errors(self) -> str:
        assert self._process.stderr is not None
        return (await asyncio.wait_for(self._process.stderr.read(), SOON_S)).decode()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def ask(self, path: str = "/v1/models", body: bytes = b"") -> bytes:
        """The status line of an answer, and all that follows until the server is done with us."""
        reader, writer = await self.connect()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        answer = await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        return answer


@contextlib.asynccontextmanager
async def started(name: str, *arguments: str) -> AsyncIterator[Process]:
    """``python`` with these arguments, for as long as the test needs it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield Process(process, name)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def program(grace_s: float, *flags: str) -> contextlib.AbstractAsyncContextManager[Process]:
    """``program.py``."""
    return started("program", str(PROGRAM), str(grace_s), *flags)
