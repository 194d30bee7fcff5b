"""Whether the server can serve: not what was once built, but what the encoder did lately.

Ready means that a forward succeeded within the last seconds, of a client's batch or, when there was none, of
a probe: one small grey picture through the whole encoder but for its cache, with a bound on its time.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import io
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import PIL.Image

from retinue.batching import BatchRecord, LifeRecord, RequestRecord
from retinue.encoder import AsyncVisionEncoder
from retinue.errors import InvalidInput, RetinueError
from retinue.media import Image

__all__ = ["Phase", "Readiness", "Report", "probe_picture"]

_FRESH_S = 10.0  # a success this old needs no probe
_PROBE_TIMEOUT_S = 5.0
_PROBE_SIDE = 224  # pixels: what nearly every encoder takes


class Phase(Enum):
    """The life of a server; it only ever moves down this list."""

    BUILDING = "building"
    SERVING = "serving"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True)
class Report:
    """The answer of ``/ready``; ``reason`` says why not, and is empty if ready. Times are in seconds."""

    ready: bool
    phase: str
    reason: str
    oldest_wait_s: float | None
    last_forward_s_ago: float | None


class Readiness:
    """Watches one encoder, as an observer of it, and probes it when it has been idle."""

    def __init__(
        self,
        encoder: AsyncVisionEncoder[Any, Any, Any],
        *,
        clock: Callable[[], float] = time.monotonic,
        probe_timeout_s: float = _PROBE_TIMEOUT_S,
    ) -> None:
        self.phase = Phase.BUILDING
        self.reason = ""
        self.failed: concurrent.futures.Future[str] = concurrent.futures.Future()  # why, once it has
        self._ailment = ""  # what befell the backend, and may pass
        self._encoder = encoder
        self._clock = clock
        self._probe_timeout_s = probe_timeout_s
        self._succeeded_s: float | None = None
        self._probing: asyncio.Task[str] | None = None

    def fail(self, reason: str) -> None:
        """From now on it is not ready, and this is why."""
        self.phase, self.reason = Phase.FAILED, reason
        if not self.failed.done():
            self.failed.set_result(reason)

    def on_batch(self, record: BatchRecord) -> None:
        """Of ``retinue.Observer``."""
        if record.outcome == "ok":
            self._succeeded_s = self._clock()

    def on_request(self, record: RequestRecord) -> None:
        """Of ``retinue.Observer``."""

    def on_life(self, record: LifeRecord) -> None:
        """Of ``retinue.batching.LifeObserver``."""
        if record.event == "failed":
            self.fail("the backend has failed and is not built again")
        elif record.event == "lost":
            self._ailment = "the backend was lost and is being built again"
        elif record.event == "stuck":
            self._ailment = record.reason
        else:
            self._ailment = ""

    async def report(self) -> Report:
        """Whether it is ready now; probes if nothing else can tell."""
        reason = self.reason or f"the server is {self.phase.value}"
        if self.phase is Phase.SERVING:
            reason = self._ailment or ("" if self._is_fresh() else await self._probe())
        pending = self._encoder.pending()
        return Report(
            ready=not reason,
            phase=self.phase.value,
            reason=reason,
            oldest_wait_s=pending.oldest_wait_s,
            last_forward_s_ago=None if self._succeeded_s is None else self._clock() - self._succeeded_s,
        )

    def _is_fresh(self) -> bool:
        return self._succeeded_s is not None and self._clock() - self._succeeded_s < _FRESH_S

    async def _probe(self) -> str:
        """Why a forward did not succeed, or nothing; who asks meanwhile shares the answer."""
        if self._probing is None or self._probing.done():
            self._probing = asyncio.ensure_future(self._forward())
        return await asyncio.shield(self._probing)

    async def _forward(self) -> str:
        try:
            probing = self._encoder.encode([probe_picture()], fresh=True)
            await asyncio.wait_for(probing, self._probe_timeout_s)
        except (TimeoutError, asyncio.TimeoutError):
            running_s = self._encoder.pending().running_s
            running = "" if running_s is None else f"; a call has been running for {running_s:.1f} s"
            return f"no forward succeeded within {self._probe_timeout_s:g} s{running}"
        except InvalidInput:
            return ""  # this encoder takes no such picture, and it said so: it lives
        except RetinueError as error:
            return f"a forward failed: {type(error).__name__}"
        self._succeeded_s = self._clock()  # its record may come later than its result
        return ""


def probe_picture() -> Image:
    """A picture that nearly every encoder takes."""
    file = io.BytesIO()
    PIL.Image.new("RGB", (_PROBE_SIDE, _PROBE_SIDE), (128, 128, 128)).save(file, "PNG")
    return Image(file.getvalue())
