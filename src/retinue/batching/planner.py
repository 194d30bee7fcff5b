"""What goes into the next batch: a function of what waits and of the limits.

No lock, no clock and no thread. The longest-waiting item leads the next batch of its key. Others join it
first come, first served, until one does not fit. Then size counts for a while: that one, the last that did
fit and the next ``LOOK_AHEAD`` compete for the room, largest first, for small ones find a gap later. Behind
those it is first come, first served again, until one does not fit.

So a batch is never emptier than first come, first served alone would have it. Whoever is left out while a
later one of its key is taken is overtaken, by at most ``MAX_TIMES_PASSED`` batches; then nothing behind it is
taken before it. Items of equal cost never overtake each other.
"""

from __future__ import annotations

import itertools
import math
import operator
from bisect import bisect_left
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from retinue.batching.memory import Ceilings
from retinue.errors import InvalidInput

#: How many batches may pass an item over to take a later one that fits.
MAX_TIMES_PASSED = 8
#: How many items behind the first that does not fit compete with it for the room. More is not better: who is
#: overtaken too often too soon gets its turn in emptier batches.
LOOK_AHEAD = 16


@dataclass(frozen=True)
class Limits:
    """What one batch may hold; checked at birth.

    ``max_batch_cost``: summed cost, None for no cap. ``max_batch_items``: number of items, None for no cap.
    ``buckets``: costs for which a graph exists, increasing, the last equal to ``max_batch_cost``; where only
    the buckets are given, the last is the cap.
    """

    max_batch_cost: int | None = None
    max_batch_items: int | None = None
    buckets: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        for name in ("max_batch_cost", "max_batch_items"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, positive_int(value, f"{name} must be a positive int or None"))
        rule = "buckets must be increasing positive ints"
        buckets = tuple(positive_int(rung, rule) for rung in self.buckets or ())
        if any(low >= high for low, high in itertools.pairwise(buckets)):
            raise ValueError(f"{rule}, got {list(buckets)}")
        object.__setattr__(self, "buckets", buckets)
        if buckets and self.max_batch_cost is None:
            object.__setattr__(self, "max_batch_cost", buckets[-1])
        if buckets and buckets[-1] != self.max_batch_cost:
            raise ValueError(
                f"the last of buckets must equal max_batch_cost, got {buckets[-1]} and {self.max_batch_cost}"
            )

    def admit(self, cost: Any, index: int, count: int, noun: str = "item") -> int:
        """Return ``cost`` as an int; ``InvalidInput`` if it is none or could never be in a batch.

        The error names the item by its position, as in "item 2 of 3" for ``index`` 1.
        """
        cap = self.max_batch_cost
        if type(cost) is int and cost > 0 and (cap is None or cost <= cap):
            return cost
        what = f"{noun} {index + 1} of {count}"
        try:
            cost = positive_int(cost, "a cost must be a positive int")
        except ValueError as error:
            raise InvalidInput(f"{what}: {error}", position=index) from None
        if cap is not None and cost > cap:
            raise InvalidInput(
                f"{what} costs {cost}, which exceeds max_batch_cost={cap}; "
                f"it would need max_batch_cost={cost}",
                position=index,
            )
        return int(cost)

    def rung(self, cost: float) -> int | None:
        """The smallest bucket that holds ``cost``; None without buckets."""
        return self.buckets[bisect_left(self.buckets, cost)] if self.buckets else None


def positive_int(value: Any, rule: str) -> int:
    """Return ``value`` as an int (numpy's ints pass, bools do not) or raise ``ValueError`` with ``rule``."""
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"{rule}, got {value!r}")
    return number


#: One item on its way: the item, its cost, the request that it belongs to and its index there. A plain tuple,
#: for one is made for every item.
Work: TypeAlias = tuple[Any, int, Any, int]


class Lane:
    """The waiting works of one key, by the number of their arrival."""

    __slots__ = ("cost", "first", "times_passed", "works")

    def __init__(self, first: int) -> None:
        self.first = first  # no work of this lane arrived before
        self.works: dict[int, Work] = {}  # in order of arrival; a dict, because any of them may leave
        self.cost = 0
        self.times_passed: dict[int, int] = {}  # of those that were passed over

    def head(self) -> int:
        """The arrival of the work that has waited longest."""
        return next(iter(self.works))


class Plan(NamedTuple):
    """The next batch, longest-waiting work first. It still waits until ``Waiting.claim``."""

    key: Hashable
    works: list[Work]
    cost: int
    arrivals: list[int] | None  # None: all of its lane
    overtaken: list[int]  # arrivals of those that it passes over to take a later one


class Waiting:
    """All works that no batch has claimed yet."""

    def __init__(self) -> None:
        self._lanes: dict[Hashable, Lane] = {}
        self.arrivals = 0  # the number of the next work to arrive

    def __bool__(self) -> bool:
        return bool(self._lanes)

    def __len__(self) -> int:
        return sum(len(lane.works) for lane in self._lanes.values())

    @property
    def cost(self) -> int:
        """Summed cost of all that waits."""
        return sum(lane.cost for lane in self._lanes.values())

    def works(self) -> list[Work]:
        """All that waits."""
        return [work for lane in self._lanes.values() for work in lane.works.values()]

    def add(self, work: Work, key: Hashable = None) -> None:
        """Put ``work`` at the end of the lane of its key; its arrival is ``arrivals`` as it was before."""
        try:
            lane = self._lanes[key]
        except KeyError:
            lane = self._lanes[key] = Lane(self.arrivals)
        lane.works[self.arrivals] = work
        lane.cost += work[1]
        self.arrivals += 1

    def remove(self, arrival: int, key: Hashable = None) -> None:
        """Take out the work that arrived as number ``arrival`` under ``key``, if it waits."""
        lane = self._lanes.get(key)
        work = None if lane is None else lane.works.pop(arrival, None)
        if lane is not None and work is not None:
            lane.cost -= work[1]
            lane.times_passed.pop(arrival, None)
            if not lane.works:
                del self._lanes[key]

    def oldest(self) -> Work:
        """The work that has waited longest of all; there must be one."""
        lane = self._lanes[self._oldest_key()]
        return lane.works[lane.head()]

    def fills_a_batch(self, limits: Limits, ceilings: Ceilings | None = None) -> bool:
        """Whether more company for the oldest work would have to go into a later batch."""
        key = self._oldest_key()
        lane = self._lanes[key]
        cap = _cap(limits, ceilings, key)
        return (cap is not None and lane.cost >= cap) or (
            limits.max_batch_items is not None and len(lane.works) >= limits.max_batch_items
        )

    def next_in_line(self, limits: Limits, ceilings: Ceilings | None = None) -> tuple[Hashable, int, float]:
        """The key that the next batch will have, how much of it waits, and how much would fill the batch."""
        key = self._oldest_key()
        lane = self._lanes[key]
        cap = _cap(limits, ceilings, key)
        most = math.inf if cap is None else cap
        if limits.max_batch_items is not None:
            most = min(most, limits.max_batch_items * lane.cost / len(lane.works))
        return key, lane.cost, most

    def plan(self, limits: Limits, ceilings: Ceilings | None = None) -> Plan:
        """The next batch; there must be a work that waits. A single one may cost more than its ceiling."""
        key = self._oldest_key()
        lane = self._lanes[key]
        cap = _cap(limits, ceilings, key)
        if (cap is None or lane.cost <= cap) and (
            limits.max_batch_items is None or len(lane.works) <= limits.max_batch_items
        ):
            return Plan(key, list(lane.works.values()), lane.cost, None, [])
        arrivals, overtaken = _fill(lane, cap, limits.max_batch_items)
        works = [lane.works[arrival] for arrival in arrivals]
        return Plan(key, works, sum([work[1] for work in works]), arrivals, overtaken)

    def claim(self, plan: Plan) -> None:
        """Take out what was planned, with nothing in between."""
        if plan.arrivals is None:
            del self._lanes[plan.key]
        else:
            times_passed = self._lanes[plan.key].times_passed
            for arrival in plan.overtaken:
                times_passed[arrival] = times_passed.get(arrival, 0) + 1
            for arrival in plan.arrivals:
                self.remove(arrival, plan.key)

    def _oldest_key(self) -> Hashable:
        oldest_key: Hashable = None
        oldest: float = math.inf
        for key, lane in self._lanes.items():
            if lane.first > oldest:  # as are those of all lanes behind, which began even later
                break
            head = lane.head()
            if head < oldest:
                oldest_key, oldest = key, head
        return oldest_key


def _cap(limits: Limits, ceilings: Ceilings | None, key: Hashable) -> int | None:
    ceiling = ceilings.of(key) if ceilings else None
    cap = limits.max_batch_cost
    return cap if ceiling is None or (cap is not None and cap < ceiling) else ceiling


def _fill(lane: Lane, cap: int | None, max_items: int | None) -> tuple[list[int], list[int]]:
    """The arrivals, in order, of the head of ``lane`` and of those that go with it; also, of those that these
    overtake. Not all of the lane may fit.
    """
    room = math.inf if cap is None else cap
    times_passed = lane.times_passed
    batch: list[int] = []
    rivals: list[tuple[int, int]] = []  # minus the cost, and the arrival
    behind = iter(lane.works.items())
    for arrival, work in behind:
        cost = work[1]
        if cost > room and batch:
            rivals.append((-cost, arrival))
            break
        batch.append(arrival)
        room -= cost
        if room <= 0 or len(batch) == max_items:
            return batch, []
    # Whoever came earlier was passed over at least as often, so those due stand in front of all others.
    if times_passed.get(arrival) == MAX_TIMES_PASSED:
        return batch, []
    if len(batch) > 1 and times_passed.get(batch[-1]) != MAX_TIMES_PASSED:
        cost = lane.works[batch[-1]][1]
        rivals.append((-cost, batch.pop()))
        room += cost
    rivals += [(-work[1], arrival) for arrival, work in itertools.islice(behind, LOOK_AHEAD)]
    rivals.sort()
    left_out: list[int] = []
    for minus_cost, arrival in rivals:
        if -minus_cost <= room and len(batch) != max_items:
            batch.append(arrival)
            room += minus_cost
        else:
            left_out.append(arrival)
    for arrival, work in behind:
        cost = work[1]
        if cost > room or len(batch) == max_items:
            break
        batch.append(arrival)
        room -= cost
    batch.sort()
    return batch, sorted(arrival for arrival in left_out if arrival < batch[-1])
