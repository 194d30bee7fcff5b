"""What happened to a batch and to a request, for whoever observes.

An observer's methods run on the thread where the thing happened: the actor thread for batches and for
requests that it answers, the caller's thread for requests that their callers left. They must be quick, must
not call back into the batcher, and may be called from several threads at once; what they raise is logged.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True)
class BatchRecord:
    """One call of ``fn``. Times are in seconds."""

    id: int  #: 1 for the first call of a batcher, and so on
    items: int
    requests: int  #: how many requests these items belong to
    cost: int
    key: Hashable
    bucket: int | None  #: the ``target_bucket`` that the call got
    oldest_wait_s: float  #: how long its longest-waiting item had waited when it was claimed
    duration_s: float  #: of the call
    outcome: Literal["ok", "failed"]


@dataclass(frozen=True)
class RequestRecord:
    """One ``submit`` that was accepted, when it has ended. Times are in seconds."""

    items: int
    cost: int
    ahead_items: int  #: items that waited already when this request came: its place in the queue
    ahead_cost: int
    batches: tuple[int, ...]  #: ids of the batches that claimed its items, in order
    wait_s: float | None  #: until the first of its items was claimed; None if none was
    total_s: float
    outcome: Literal["ok", "failed", "left"]


@dataclass(frozen=True)
class Pending:
    """What a batcher has accepted and not answered yet. Times are in seconds."""

    items: int  #: that wait
    cost: int  #: of those that wait
    oldest_wait_s: float | None  #: None if nothing waits, or if there is no observer to ask for it
    running_cost: int  #: of the call that runs
    running_s: float | None  #: how long it has been running; None if none runs


class Observer(Protocol):
    """Gets a record of each batch and of each accepted request as it ends."""

    def on_batch(self, record: BatchRecord) -> None:
        """A call of ``fn`` has ended and its results are on their way."""

    def on_request(self, record: RequestRecord) -> None:
        """A request has ended."""
