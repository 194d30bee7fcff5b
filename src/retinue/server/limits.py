"""How much a server takes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

__all__ = ["ServerLimits"]


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """How much a server takes on. What is beyond a limit is refused at once."""

    max_concurrent_requests: int = 256
    """Requests in flight, from their first byte to their last; beyond it 429."""
    max_pending_cost: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Summed cost of the images that wait for the encoder or run, in the backend's unit; beyond it 429."""
    max_pending_bytes: int = 2**30
    """Memory for the bodies and pictures of requests that wait for the encoder; beyond it 429."""
    max_body_bytes: int = 64 * 2**20
    """Size of one request; beyond it 413."""
    request_timeout_s: Annotated[float, tyro.conf.arg(name="request-timeout")] = 600.0
    """Seconds until the answer to a request begins; beyond it 504."""
    client_embeds: bool = False
    """Let clients send prompt_embeds parts of their own. Only for clients that you trust as your own code."""

    def __post_init__(self) -> None:
        for name in ("max_concurrent_requests", "max_pending_bytes", "max_body_bytes", "request_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0, got {getattr(self, name)!r}")
