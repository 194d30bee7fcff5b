"""The contract between an encoder author and everything else.

Which thread runs what
    ``build``, every ``forward_batch`` and ``close`` run on one thread, the actor, and no other:
    CUDA graphs, streams and thread-local state made in ``build`` are valid in all of them.
    ``preprocess`` and ``cache_key`` run on pool threads, several calls at once; they must not touch what the
    actor owns.

What an exception means
    ``InvalidInput`` from ``preprocess``: the caller's fault, its message is shown to the caller.
    ``ValueError`` and ``TypeError`` from ``preprocess``: the caller's fault, its text is not shown.
    Anything else, and anything from ``forward_batch``: the backend's fault (``EncoderFailed``).
    From ``forward_batch`` besides: where it is out of memory (``is_out_of_memory``) the batch is run again in
    halves; where the backend is lost (``is_fatal``: ``BackendLost``) it is closed and built again on a fresh
    thread, and what was in flight is run once more; after any other error a batch of several requests is
    split, so that only the items fail that fail on their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from retinue.batching import memory
from retinue.encoder.cache import content_key
from retinue.errors import BackendLost

RawT = TypeVar("RawT")
ItemT = TypeVar("ItemT")
ArtifactT = TypeVar("ArtifactT")


@dataclass(frozen=True)
class Preprocessed(Generic[ItemT]):
    """One image, ready to be batched.

    ``item``: what ``forward_batch`` gets. ``cost``: how much of ``max_batch_cost`` it takes, a positive
    int in a unit that the author chooses (visual tokens, say). ``key``: only items of equal keys share a
    batch; any hashable, such as a shape.
    """

    item: ItemT
    cost: int = 1
    key: Hashable = None


class VisionEncoderBackend(ABC, Generic[RawT, ItemT, ArtifactT]):
    """What an encoder author writes: ``build``, ``forward_batch``; if needed ``preprocess`` and ``close``.

    The attributes are read once, when the encoder loads; those about artifacts after ``build``, which may set
    them.
    """

    #: Largest summed cost of one ``forward_batch``; None: no cap.
    max_batch_cost: int | None = None
    #: Largest number of items of one ``forward_batch``; None: no cap.
    max_batch_items: int | None = None
    #: Costs for which a graph was captured, increasing; the last equals ``max_batch_cost``. Each
    #: ``forward_batch`` then gets the smallest that holds its batch as ``target_bucket``.
    buckets: Sequence[int] | None = ()
    #: Width of every artifact; None: whatever most of them have. Read, like the next two, after ``build``.
    hidden_size: int | None = None
    #: Dtype of every artifact: torch's or numpy's, or its name, such as "bfloat16"; None: any.
    dtype: Any | None = None
    #: Whether each artifact is looked through for NaN and infinity.
    check_finite: bool = True
    #: Whether items of a ``forward_batch`` that failed may go through it again.
    may_repeat: bool = True
    #: Threads for ``preprocess``; None: chosen from the cores. Unused by a backend that does not override it.
    preprocess_concurrency: int | None = None

    @abstractmethod
    def build(self, model_id: str) -> None:
        """Load weights, capture graphs, try the largest legal batch. Actor thread, once."""

    def preprocess(self, raw: RawT) -> Preprocessed[ItemT]:
        """Turn what a caller sends into an item. Pool threads, several at once.

        A class that does not override this has no preprocess phase: its raws are its items, of cost 1.
        """
        return Preprocessed(cast(ItemT, raw))

    def cache_key(self, raw: RawT) -> Hashable | None:
        """What is equal for raws of one artifact, and for no others; None: ``raw`` is never cached.

        Pool threads, before ``preprocess``, and only where the encoder has a cache. The default is type,
        length and digest of ``bytes``, and of what has a ``content_key`` as ``retinue.media.Image`` has; for
        all else None. Override it where an artifact depends on more than that, or on less.
        """
        if type(raw) is bytes:
            return bytes, content_key(cast(bytes, raw))
        content = getattr(raw, "content_key", None)
        return None if content is None else (type(raw), content)

    @abstractmethod
    def forward_batch(self, items: list[ItemT], target_bucket: int | None = None) -> Sequence[ArtifactT]:
        """Encode one batch within the limits; return one artifact per item, in order. Actor thread.

        A list or tuple, or an array whose first axis is the batch. The artifacts must be finished
        (synchronise the stream) and the callers' to keep: never in a buffer that a later call overwrites.

        An artifact that is an array must be ``(rows, hidden)`` with 1 row or more, of the declared
        ``hidden_size`` and ``dtype``, finite, and where no artifact of an earlier call still is, be it a
        constant; one that is not fails its own request alone. A view of a larger buffer, or what is not
        contiguous, is copied; what requires a gradient is detached. All else, such as a list, is unchecked.
        """

    def close(self) -> None:
        """Release what ``build`` made. Actor thread, once, after the last ``forward_batch``."""

    # ---- what went wrong: actor thread

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether ``error`` says that the batch needed more memory than there was.

        Known already: ``MemoryError``, torch's and CUDA's errors, onnxruntime's.
        """
        return memory.is_out_of_memory(error)

    def release_memory(self) -> None:
        """Give back what can be given back, ``torch.cuda.empty_cache()`` say, before smaller batches run."""

    def is_fatal(self, error: BaseException) -> bool:
        """Whether nothing can be served any more before the backend is built again."""
        return isinstance(error, BackendLost)


#: For code that does not care about the three types.
AnyBackend = VisionEncoderBackend[Any, Any, Any]

__all__ = ["AnyBackend", "ArtifactT", "ItemT", "Preprocessed", "RawT", "VisionEncoderBackend"]
