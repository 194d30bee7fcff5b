"""What happened to a batch and to a request, for whoever observes.

An observer's methods run on the thread where the thing happened: the actor thread for batches and for
requests that it answers, the caller's thread for requests that their callers left. They must be quick, must
not call back into the batcher, and may be called from several threads at once; what they raise is logged.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

#: How a call ended: with results; with an error; out of memory; with the loss of the backend; or after
#: ``forward_timeout_s``, when its callers had been answered already.
Outcome: TypeAlias = Literal["ok", "failed", "out_of_memory", "lost", "late"]


class BatchRecord(NamedTuple):
    """One call of ``fn``. Times are in seconds."""

    id: int  #: 1 for the first call of a batcher, and so on
    items: int
    requests: int  #: how many requests these items belong to
    cost: int
    key: Hashable
    bucket: int | None  #: the ``target_bucket`` that the call got
    oldest_wait_s: float  #: how long its longest-waiting item had waited when it was claimed
    duration_s: float  #: of the call
    outcome: Outcome
    is_retry: bool = False  #: whether it ran what had been in flight before
    held_s: float = 0.0  #: how long it was held for company that was expected
    gap_s: float = 0.0  #: what else passed since the call before it ended or its oldest item came


class RequestRecord(NamedTuple):  # one is made for every request: quicker than a dataclass
    """One ``submit`` that was accepted, when it has ended. Times are in seconds."""

    items: int
    cost: int
    ahead_items: int  #: items that waited already when this request came: its place in the queue
    ahead_cost: int
    batches: tuple[int, ...]  #: ids of the batches that claimed its items, in order
    wait_s: float | None  #: until the first of its items was claimed; None if none was
    total_s: float
    outcome: Literal["ok", "failed", "left"]
    expected_wait_s: float = 0.0  #: what ``wait_s`` was expected to be when it came
    arrived_s: float = 0.0  #: on the monotonic clock
    costs: tuple[int, ...] = ()  #: of its items, in order
    keys: tuple[Hashable, ...] = ()


@dataclass(frozen=True)
class Pending:
    """What a batcher has accepted and not answered yet. Times are in seconds."""

    items: int  #: that wait, or wait to be run again
    cost: int  #: of those
    oldest_wait_s: float | None  #: None if nothing waits
    running_cost: int  #: of the call that runs
    running_s: float | None  #: how long it has been running; None if none runs
    cost_ceiling: int | None = None  #: the lowest that running out of memory has set; None if none has
    expected_wait_s: float = 0.0  #: until a call would begin with whoever comes now, by what was measured


@dataclass(frozen=True)
class LifeRecord:
    """Something befell the backend as a whole.

    ``lost``: it must be built again; ``rebuilt``: it was; ``failed``: it will not be, and no request is taken
    any more; ``stuck``: a call runs for longer than ``forward_timeout_s``; ``back``: that call has ended.
    """

    event: Literal["lost", "rebuilt", "failed", "stuck", "back"]
    reason: str


class Observer(Protocol):
    """Gets a record of each batch and of each accepted request as it ends."""

    def on_batch(self, record: BatchRecord) -> None:
        """A call of ``fn`` has ended and its results are on their way."""

    def on_request(self, record: RequestRecord) -> None:
        """A request has ended."""


@runtime_checkable
class LifeObserver(Protocol):
    """An observer that also hears what befalls the backend, on the thread that notices."""

    def on_life(self, record: LifeRecord) -> None:
        """The backend was lost, built again, given up, is stuck, or is back."""
