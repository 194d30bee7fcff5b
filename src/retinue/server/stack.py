"""All parts of one server, built, wired and ended together.

From the outside in: ``Operations`` (health, readiness, metrics), ``Door`` (key, concurrency, deadline),
``EncodeImages``, and the app behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from retinue.batching import Observer
from retinue.encoder import VisionEncoderBackend
from retinue.media import MediaPolicy
from retinue.server.door import Door
from retinue.server.front import Front
from retinue.server.limits import FailurePolicy, ServerLimits
from retinue.server.operations import Operations

__all__ = ["Behind", "Stack"]


async def _nothing() -> None:
    """What an app without a life of its own needs to be loaded or closed."""


@dataclass(frozen=True)
class Behind:
    """The app behind the encoder, how it is loaded and closed, and whether it takes artifacts as they are."""

    app: ASGIApp
    load: Callable[[], Awaitable[object]] = _nothing
    close: Callable[[], Awaitable[object]] = _nothing
    takes_artifacts: bool = False


class Stack:
    """One server without its sockets: ``app`` is ASGI, ``build`` and ``close`` are its life.

    It answers from the beginning: health at once, all else with 503 until it is built.
    """

    def __init__(
        self,
        backend: VisionEncoderBackend[Any, Any, Any],
        model_id: str,
        behind: Behind,
        *,
        limits: ServerLimits | None = None,
        media: MediaPolicy | None = None,
        failures: FailurePolicy | None = None,
        api_key: str | None = None,
        observer: Observer | None = None,
        join_timeout_s: float = 10.0,
    ) -> None:
        self.limits = limits = limits or ServerLimits()
        self.failures = failures = failures or FailurePolicy()
        self._model_id = model_id
        self._behind = behind
        self._front = Front(
            behind.app,
            backend,
            limits=limits,
            media=media or MediaPolicy(),
            failures=failures,
            observer=observer,
            join_timeout_s=join_timeout_s,
            artifacts=behind.takes_artifacts,
        )
        self.encoder, self.metrics = self._front.encoder, self._front.metrics
        self.readiness = self._front.readiness
        door = Door(
            self._front.app,
            api_key=api_key,
            max_concurrent_requests=limits.max_concurrent_requests,
            request_timeout_s=limits.request_timeout_s,
        )
        self.metrics.gauge("retinue_requests_in_flight", "Requests in flight", lambda: door.in_flight)
        self.metrics.gauge("retinue_rejected", "Requests refused at the door", lambda: door.rejected)
        self._door = door
        self.app: ASGIApp = Operations(door, readiness=self.readiness, metrics=self.metrics.text)

    def record(self, path: Path) -> None:
        """Append a trace of what is encoded to the file at ``path``; ``OSError`` if it cannot be opened."""
        self._front.record(path)

    async def build(self) -> None:
        """Load the encoder and what is behind it; from then on it is ready. Raises what that raised."""
        await self._front.build(self._model_id)
        try:
            await self._behind.load()
        except BaseException as error:
            self._front.fail(error)
            raise
        self._front.open()

    def drain(self) -> None:
        """Say that it is not ready any more; what is in flight goes on."""
        self._front.drain()

    def shut(self) -> None:
        """Answer 503 to all whose answer has not begun."""
        self._door.shut()

    async def close(self) -> None:
        """End all parts; each is ended, even if another fails to."""
        outcomes = await asyncio.gather(self._front.close(), self._behind.close(), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
