"""How much a server takes on."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from retinue.batching.batcher import forward_timeout, rebuild_bound
from retinue.encoder.driver import cache_budget

__all__ = ["EncodeLimits", "FailurePolicy", "ServerLimits", "memory_at_hand"]

_CACHED_SHARE = 16  # one part in so many of the memory at hand is for artifacts
_MOST_CACHED_BYTES = 2**32


@dataclass(frozen=True, kw_only=True)
class EncodeLimits:
    """How much work with images is taken on. What is beyond a limit is refused at once."""

    max_pending_cost: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Summed cost of the images that wait for the encoder or run, in the backend's unit; beyond it 429."""
    max_pending_bytes: int = 2**30
    """Memory for the bodies and pictures of requests that wait for the encoder; beyond it 429."""
    max_body_bytes: int = 64 * 2**20
    """Size of one request; beyond it 413."""
    client_timeout_s: Annotated[float, tyro.conf.arg(name="client-timeout")] = 30.0
    """Seconds that a client may keep us waiting: for its headers, for the next 64 KiB of its body, for it to
    take more of an answer; beyond it 408, or the end of its connection."""
    artifact_cache_bytes: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Memory for the artifacts of images that came before, which are not encoded again; 0 for none. If not
    given, a sixteenth of what this process may use (the machine's memory, or its control group's limit),
    4 GiB at most."""
    client_embeds: bool = False
    """Let clients send prompt_embeds parts of their own. Only for clients that you trust as your own code."""

    def __post_init__(self) -> None:
        _check_positive(self, "max_pending_bytes", "max_body_bytes", "client_timeout_s")
        if self.artifact_cache_bytes is not None:
            cache_budget(self.artifact_cache_bytes)

    def cache_bytes(self) -> int:
        """``artifact_cache_bytes``, or what it is if not given."""
        if self.artifact_cache_bytes is not None:
            return self.artifact_cache_bytes
        return min(memory_at_hand() // _CACHED_SHARE, _MOST_CACHED_BYTES)


@dataclass(frozen=True, kw_only=True)
class ServerLimits(EncodeLimits):
    """How much a server takes on. What is beyond a limit is refused at once."""

    max_header_bytes: int = 2**16
    """Size of a request's first line and headers, 32 bytes counted on top for each of them; beyond it 431."""
    max_concurrent_requests: int = 256
    """Requests in flight, from their first byte to their last; beyond it 429."""
    request_timeout_s: Annotated[float, tyro.conf.arg(name="request-timeout")] = 600.0
    """Seconds until the answer to a request begins; beyond it 504."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_positive(self, "max_header_bytes", "max_concurrent_requests", "request_timeout_s")


@dataclass(frozen=True, kw_only=True)
class FailurePolicy:
    """What is done about a backend that fails as a whole."""

    forward_timeout_s: Annotated[float | None, tyro.conf.arg(name="forward-timeout", metavar="FLOAT")] = None
    """Seconds that a forward may run; beyond it its requests get 504, and others 503 until it ends."""
    max_rebuilds: int = 3
    """How often a lost backend is built again within --rebuild-window; then all requests get 503."""
    rebuild_window_s: Annotated[float, tyro.conf.arg(name="rebuild-window")] = 300.0
    """Seconds."""
    exit_on_failure: bool = False
    """Exit with status 1 once the backend is not built again, for a supervisor that starts processes anew."""

    def __post_init__(self) -> None:
        _check_positive(self, "rebuild_window_s")
        forward_timeout(self.forward_timeout_s)
        rebuild_bound(self.max_rebuilds)


def _check_positive(limits: object, *names: str) -> None:
    for name in names:
        if not getattr(limits, name) > 0:
            raise ValueError(f"{name} must be more than 0, got {getattr(limits, name)!r}")


def memory_at_hand(root: Path = Path("/")) -> int:
    """Bytes of this machine's memory, or of what control groups leave this process, of version 1 or 2.

    ``root``: where /proc and /sys are.
    """
    bounds = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    groups = []
    with contextlib.suppress(OSError):  # no Linux
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, file = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            top, file = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = top / path.lstrip("/")  # in a container it may name a folder that is there outside only
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):  # ValueError: "max"
                bounds.append(int((folder / file).read_text()))
            if folder == top:
                break
    return min(bounds)
