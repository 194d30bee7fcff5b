"""A server as a process of its own, and somebody who asks it all the time how it is."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from .verdict import Look

__all__ = ["HEALTH_S", "Process", "Watch"]

ROOT = Path(__file__).parents[2]

#: /health may take so long, on a machine whose cores the load has too.
HEALTH_S = 5.0

_START_S = 240.0
_STOP_S = 20.0
_ANSWER_S = 15.0

#: In no log of a server: each is a promise broken.
_COMPLAINTS = re.compile(
    r"never (retrieved|awaited)|Exception in callback|Exception ignored|Exception in ASGI|Task was destroyed"
    r"|InvalidStateError|ResourceWarning|RuntimeWarning|the batching thread crashed|an observer raised"
)


class Process:
    """A server that says on stdout where it listens and when it is ready; its log goes to a file."""

    def __init__(self, name: str, log: Path, *arguments: str) -> None:
        self.name = name
        self.url = ""
        self._log = log
        self._arguments = arguments
        self._process: asyncio.subprocess.Process | None = None

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.url.rpartition(":")[2])

    async def start(self) -> None:
        """Start it and wait until it is ready; again, once it has ended."""
        warnings = ("-W", "default::ResourceWarning", "-W", "default::RuntimeWarning")
        environment = os.environ | {"OMP_NUM_THREADS": "1"}  # several servers share the cores
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *warnings,
                *self._arguments,
                cwd=ROOT,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=environment,
            )
        self.url = (await self._line(r".*: listening on (http://\S+), building"))[1]
        await self._line(r".*: ready on .*")

    async def _line(self, pattern: str) -> re.Match[str]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = (await asyncio.wait_for(self._process.stdout.readline(), _START_S)).decode().rstrip()
        match = re.fullmatch(pattern, line)
        assert match, f"{self.name} said {line!r}, and its log {self._log.read_text()[-2000:]}"
        return match

    async def end(self, number: int = signal.SIGTERM) -> int | None:
        """Send it a signal and wait until it has ended; its exit status, None if it had to be killed."""
        process = self._process
        if process is None:
            return None
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        try:
            return await asyncio.wait_for(process.wait(), _STOP_S)
        except asyncio.TimeoutError:
            process.kill()
            await process.wait()
            return None

    def complaints(self) -> list[str]:
        """The lines of its log that should not be there."""
        lines = self._log.read_text().splitlines()
        return [f"{self.name} logged: {line}" for line in lines if _COMPLAINTS.search(line)]


class Watch:
    """Asks a server for its health and readiness, on two threads that do nothing else."""

    def __init__(self, process: Process) -> None:
        self.health_ms: list[float] = []
        self.looks: list[Look] = []
        self.problems: list[str] = []
        self._address = process.url.removeprefix("http://")
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._repeat, args=(ask, pause_s), name=f"watch of {process.name}")
            for ask, pause_s in ((self._health, 0.1), (self._ready, 0.5))
        ]

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _repeat(self, ask: Callable[[], None], pause_s: float) -> None:
        while not self._stop.wait(pause_s):
            try:
                ask()
            except (OSError, http.client.HTTPException) as error:
                self.problems.append(f"{self._address} did not say how it is: {error!r}")

    def _get(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self._address, timeout=_ANSWER_S)
        with contextlib.closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()

    def _health(self) -> None:
        began_s = time.monotonic()
        status, _ = self._get("/health")
        took_s = time.monotonic() - began_s
        self.health_ms.append(took_s * 1e3)
        if status != 200 or took_s > HEALTH_S:
            self.problems.append(f"{self._address}/health said {status} after {took_s:.1f} s")

    def _ready(self) -> None:
        began_s = time.monotonic()
        status, body = self._get("/ready")
        self.looks.append(Look(began_s, time.monotonic(), status, json.loads(body)))
