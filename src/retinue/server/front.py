"""What stands in front of an app: the media loader, the encoder, and the middleware that joins them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from retinue.batching import BatchRecord, LifeRecord, Observer, RequestRecord
from retinue.batching.planner import Limits
from retinue.batching.recording import Recorder
from retinue.encoder import AsyncVisionEncoder, VisionEncoderBackend
from retinue.errors import EncoderFailed, EncoderUnavailable, InvalidInput
from retinue.media import MediaLoader, MediaPolicy
from retinue.server.connection import PacedBodies
from retinue.server.embeds import Embeds
from retinue.server.limits import EncodeLimits, FailurePolicy
from retinue.server.metrics import Metrics
from retinue.server.middleware import EncodeImages
from retinue.server.readiness import Phase, Readiness, probe_picture

__all__ = ["Front"]


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

    def on_life(self, record: LifeRecord) -> None:
        for observer in self.observers:
            if hasattr(observer, "on_life"):
                observer.on_life(record)

    def on_preprocess(self, duration_s: float) -> None:
        for observer in self.observers:
            if hasattr(observer, "on_preprocess"):
                observer.on_preprocess(duration_s)


class Front:
    """``images`` is the middleware in front of the app that is given, ``app`` all that stands there.

    ``build`` and ``close`` are the encoder's life.
    """

    def __init__(
        self,
        app: ASGIApp,
        backend: VisionEncoderBackend[Any, Any, Any],
        *,
        limits: EncodeLimits,
        media: MediaPolicy,
        failures: FailurePolicy,
        observer: Observer | None = None,
        join_timeout_s: float = 10.0,
        **middleware: Any,
    ) -> None:
        self._backend = backend
        self._recorder: Recorder | None = None
        self._observers: list[Observer] = []  # ours first, so that what an owner hears of is already shown
        self.encoder: AsyncVisionEncoder[Any, Any, Any] = AsyncVisionEncoder(
            backend,
            artifact_cache_bytes=limits.cache_bytes(),
            max_pending_cost=limits.max_pending_cost,
            max_rebuilds=failures.max_rebuilds,
            rebuild_window_s=failures.rebuild_window_s,
            forward_timeout_s=failures.forward_timeout_s,
            observer=_Observers(self._observers),
            join_timeout_s=join_timeout_s,
        )
        self._media = MediaLoader(media)
        self.metrics = Metrics(backend.max_batch_cost)
        self.readiness = Readiness(self.encoder)
        self._observers += [self.metrics, self.readiness]
        if observer is not None:
            self._observers.append(observer)
        self.images = EncodeImages(
            app,
            encoder=self.encoder,
            media=self._media,
            max_body_bytes=limits.max_body_bytes,
            max_pending_bytes=limits.max_pending_bytes,
            client_embeds=limits.client_embeds,
            ended=self.metrics.ended,
            **middleware,
        )
        self.app: ASGIApp = PacedBodies(self.images, limits.client_timeout_s)
        self.metrics.watch(self.encoder.pending)
        self.metrics.watch_cache(self.encoder.cached)
        self.metrics.gauge("retinue_pending_bytes", "Bytes they hold", lambda: self.images.budget.held_bytes)

    def record(self, path: Path) -> None:
        """Append a trace of what is encoded to the file at ``path``; ``OSError`` if it cannot be opened."""
        backend = self._backend
        limits = Limits(backend.max_batch_cost, backend.max_batch_items, tuple(backend.buckets or ()))
        self._recorder = Recorder(path, limits)
        self._observers.append(self._recorder)

    async def build(self, model_id: str) -> None:
        """Load the encoder; raises what that raised."""
        try:
            await self.encoder.aload(model_id)
        except BaseException as error:
            self.fail(error)
            raise

    async def try_out(self) -> None:
        """Encode one picture, and see that its rows are as wide as the model's; ``ValueError`` if not.

        An encoder that refuses such a picture is not tried out: small and grey says it, as for readiness.
        """
        try:
            (artifact,) = await self.encoder.encode([probe_picture()], fresh=True)
        except InvalidInput:
            return
        try:
            Embeds(artifact, 1, 1).rows(self.images.width)
        except EncoderFailed as error:
            raise ValueError(f"the encoder does not fit the model: {error}") from None

    def open(self) -> None:
        """Be ready, now that all is built; ``EncoderUnavailable`` if it was shut down meanwhile."""
        if self.readiness.phase is not Phase.BUILDING:
            raise EncoderUnavailable("shut down while building")
        self.readiness.phase = Phase.SERVING

    def fail(self, error: BaseException) -> None:
        """Say that it could not be built."""
        self.readiness.fail(f"it could not be built: {type(error).__name__}")

    def drain(self) -> None:
        """Say that it is not ready any more; what is in flight goes on."""
        if self.readiness.phase is not Phase.FAILED:
            self.readiness.phase = Phase.DRAINING

    async def close(self) -> None:
        """End all parts; each is ended, even if another fails to."""
        self.drain()
        outcomes = await asyncio.gather(self.encoder.aclose(), self._media.aclose(), return_exceptions=True)
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.close)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
