"""A whole server without a socket, which a test asks one thing after the other."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any

from retinue.server.stack import Stack

from ..server.asgi import SOON_S, Client, Reply

__all__ = ["CHAT", "GAUGES", "Asked", "asked"]

CHAT = "/v1/chat/completions"
GAUGES = [
    "retinue_requests_in_flight",
    "retinue_pending_bytes",
    "retinue_pending_items",
    "retinue_pending_cost",
    "retinue_running_cost",
]


class Asked:
    """``stack`` on an event loop that turns only while something is asked."""

    def __init__(self, stack: Stack, loop: asyncio.AbstractEventLoop) -> None:
        self._stack = stack
        self._loop = loop
        self.complaints: list[dict[str, Any]] = []  # what the event loop would log
        loop.set_exception_handler(lambda _, context: self.complaints.append(context))

    def ask(self, client: Client) -> Reply:
        """Let ``client`` be answered, in time; afterwards nothing of it may be left."""
        reply = self._loop.run_until_complete(client.call(self._stack.app))
        self._loop.run_until_complete(self._settled())
        assert self.complaints == []
        return reply

    def chat(self, body: bytes) -> Reply:
        return self.ask(Client(CHAT, body))

    def gauges(self) -> dict[str, float | None]:
        return {name: self._stack.metrics.registry.get_sample_value(name) for name in GAUGES}

    async def _settled(self) -> None:
        """Wait until nothing is in flight: what was claimed when its client left ends in its own time."""
        until_s = time.monotonic() + SOON_S
        own = asyncio.current_task()
        while any(value != 0 for value in self.gauges().values()) or asyncio.all_tasks() != {own}:
            assert time.monotonic() < until_s, (self.gauges(), asyncio.all_tasks())
            await asyncio.sleep(0.0005)


@contextlib.contextmanager
def asked(stack: Stack) -> Iterator[Asked]:
    """``stack`` built, and closed at the end."""
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(stack.build())
        try:
            yield Asked(stack, loop)
        finally:
            loop.run_until_complete(stack.close())
            loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()
