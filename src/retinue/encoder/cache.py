"""The artifacts that were used last, within a budget of bytes; what says that images are the same.

Neither torch nor numpy is imported: an array is what looks like one of theirs.
"""

from __future__ import annotations

import collections
import ctypes
import hashlib
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

__all__ = ["ArtifactCache", "Cached", "content_key", "copy_of", "size_of"]


@dataclass(frozen=True)
class Cached:
    """What a cache holds at this moment, and what became of the images that were looked up in it."""

    entries: int = 0
    bytes: int = 0  #: of the values of the artifacts
    hits: int = 0  #: images whose artifact was there
    joined: int = 0  #: images that were on their way, for the same request or another
    misses: int = 0  #: images that had to be encoded
    evictions: int = 0  #: artifacts that made room for others


class ArtifactCache:
    """Artifacts by key; one that was used before all others makes room first.

    It is not for several threads at once, but for ``figures``. What it returns as dropped is to die where
    dying may run anything.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.joined = 0
        self.misses = 0
        self._budget_bytes = budget_bytes
        self._artifacts: collections.OrderedDict[Hashable, Any] = collections.OrderedDict()
        self._bytes = self._hits = self._evictions = 0

    def figures(self) -> Cached:
        """What it holds, and has done so far."""
        return Cached(
            entries=len(self._artifacts),
            bytes=self._bytes,
            hits=self._hits,
            joined=self.joined,
            misses=self.misses,
            evictions=self._evictions,
        )

    def get(self, key: Hashable) -> Any:
        """The artifact, or None."""
        artifact = self._artifacts.get(key)
        if artifact is not None:
            self._artifacts.move_to_end(key)
            self._hits += 1
        return artifact

    def put(self, key: Hashable, artifact: Any, dropped: list[Any]) -> bool:
        """Keep it, if it has a size within the budget; whether it is kept. What makes room is ``dropped``."""
        size = size_of(artifact)
        if size is None or size > self._budget_bytes or key in self._artifacts:
            return False
        self._artifacts[key] = artifact
        self._bytes += size
        while self._bytes > self._budget_bytes:
            _, oldest = self._artifacts.popitem(last=False)
            self._bytes -= oldest.nbytes
            self._evictions += 1
            dropped.append(oldest)
        return True

    def clear(self, dropped: list[Any]) -> None:
        """Keep nothing of what there is."""
        dropped.append(self._artifacts)
        self._artifacts, self._bytes = collections.OrderedDict(), 0

    def close(self, dropped: list[Any]) -> None:
        """Keep nothing any more."""
        self._budget_bytes = 0
        self.clear(dropped)


def content_key(data: bytes) -> tuple[int, bytes]:
    """Length and digest: clients choose the bytes, and must not be able to make others' pictures theirs."""
    return len(data), hashlib.sha256(data).digest()


def size_of(artifact: Any) -> int | None:
    """Bytes of the values of an array of torch or numpy in this machine's memory; None for all else."""
    if hasattr(artifact, "untyped_storage"):
        is_here = artifact.device.type == "cpu" and artifact.is_contiguous()
    else:
        is_here = hasattr(artifact, "__array_interface__") and not artifact.dtype.hasobject
    return int(artifact.nbytes) if is_here else None


def copy_of(artifact: Any) -> Any:
    """Another array of the same values, for one that has a size."""
    if not hasattr(artifact, "untyped_storage"):
        return artifact.copy()
    own = artifact.new_empty(artifact.shape)
    ctypes.memmove(own.data_ptr(), artifact.data_ptr(), artifact.nbytes)  # torch would use other threads
    return own
