"""All parts of one server, built, wired and ended together.

From the outside in: ``Operations`` (health, readiness, metrics), ``Door`` (key, concurrency, deadline),
``EncodeImages``, and the app behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp

from retinue.batching import BatchRecord, Observer, RequestRecord
from retinue.encoder import AsyncVisionEncoder, VisionEncoderBackend
from retinue.errors import EncoderUnavailable
from retinue.media import MediaLoader, MediaPolicy
from retinue.server.door import Door
from retinue.server.limits import ServerLimits
from retinue.server.metrics import Metrics
from retinue.server.middleware import EncodeImages
from retinue.server.operations import Operations
from retinue.server.readiness import Phase, Readiness

__all__ = ["Behind", "Stack"]


async def _nothing() -> None:
    """What an app without a life of its own needs to be loaded or closed."""


@dataclass(frozen=True)
class Behind:
    """The app behind the encoder, and how it is loaded and closed."""

    app: ASGIApp
    load: Callable[[], Awaitable[object]] = _nothing
    close: Callable[[], Awaitable[object]] = _nothing


@dataclass(frozen=True)
class _Observers:
    """One observer that is several."""

    observers: Sequence[Any] = field(default_factory=list)

    def on_batch(self, record: BatchRecord) -> None:
        for observer in self.observers:
            observer.on_batch(record)

    def on_request(self, record: RequestRecord) -> None:
        for observer in self.observers:
            observer.on_request(record)

    def on_preprocess(self, duration_s: float) -> None:
        for observer in self.observers:
            if hasattr(observer, "on_preprocess"):
                observer.on_preprocess(duration_s)


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
        api_key: str | None = None,
        observer: Observer | None = None,
        join_timeout_s: float = 10.0,
    ) -> None:
        limits = limits or ServerLimits()
        observers: list[Observer] = [] if observer is None else [observer]
        self._model_id = model_id
        self._behind = behind
        self.encoder: AsyncVisionEncoder[Any, Any, Any] = AsyncVisionEncoder(
            backend,
            max_pending_cost=limits.max_pending_cost,
            observer=_Observers(observers),
            join_timeout_s=join_timeout_s,
        )
        self._media = MediaLoader(media or MediaPolicy())
        self.metrics = Metrics(backend.max_batch_cost)
        self.readiness = Readiness(self.encoder)
        observers += [self.metrics, self.readiness]
        images = EncodeImages(
            behind.app,
            encoder=self.encoder,
            media=self._media,
            max_body_bytes=limits.max_body_bytes,
            max_pending_bytes=limits.max_pending_bytes,
            client_embeds=limits.client_embeds,
            ended=self.metrics.ended,
        )
        door = Door(
            images,
            api_key=api_key,
            max_concurrent_requests=limits.max_concurrent_requests,
            request_timeout_s=limits.request_timeout_s,
        )
        self.metrics.watch(self.encoder.pending)
        self.metrics.gauge("retinue_requests_in_flight", "Requests in flight", lambda: door.in_flight)
        self.metrics.gauge("retinue_pending_bytes", "Bytes they hold", lambda: images.budget.held_bytes)
        self.metrics.gauge("retinue_rejected", "Requests refused at the door", lambda: door.rejected)
        self.app: ASGIApp = Operations(door, readiness=self.readiness, metrics=self.metrics.text)

    async def build(self) -> None:
        """Load the encoder and what is behind it; from then on it is ready. Raises what that raised."""
        try:
            await self.encoder.aload(self._model_id)
            await self._behind.load()
        except BaseException as error:
            self.readiness.fail(f"it could not be built: {type(error).__name__}")
            raise
        if self.readiness.phase is not Phase.BUILDING:
            raise EncoderUnavailable("shut down while building")
        self.readiness.phase = Phase.SERVING

    def drain(self) -> None:
        """Say that it is not ready any more; what is in flight goes on."""
        if self.readiness.phase is not Phase.FAILED:
            self.readiness.phase = Phase.DRAINING

    async def close(self) -> None:
        """End all parts; each is ended, even if another fails to."""
        self.drain()
        endings = (self.encoder.aclose(), self._behind.close(), self._media.aclose())
        outcomes = await asyncio.gather(*endings, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
