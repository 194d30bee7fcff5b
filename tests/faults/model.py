"""A reference model of what DESIGN.md guarantees: the books that a schedule's driver keeps and compares.

It knows nothing of how the batcher works. It is told what each call held and how it ended, and says whether
that was allowed; of each request it says how it must have ended, or how it may have. Whatever is not allowed
is an ``AssertionError``. Numbers in messages are those of the items, which count up over all requests.

Where the guarantees leave a choice, so does the model: in which pieces a failed batch is run again, and what
a request may still cost when its caller has left and nobody has noticed yet.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, TypeAlias

from .schedule import REBUILD_WINDOW_S, Fault, Setup

#: By how many batches an item may be overtaken, as docs/batching.md says.
MOST_OVERTAKEN = 8
#: After so many batches in a row without any success, none is split until a call succeeds.
MOST_IN_VAIN = 2

Outcome: TypeAlias = Literal["ok", "failed", "unavailable", "deadline", "left"]
#: How a call ended.
Ending: TypeAlias = Literal["ok", "failed", "out_of_memory", "lost"]


class Place(Enum):
    """Where an item is."""

    WAITING = "waiting"
    RUNNING = "running"
    AGAIN = "to be run again"
    DONE = "answered"
    GONE = "dropped"


_WAITING, _RUNNING, _AGAIN, _DONE, _GONE = Place


@dataclass(eq=False, slots=True)
class Item:
    """One item, by the books."""

    number: int
    key: str
    cost: int
    fault: Fault
    request: Request
    index: int
    arrived_s: float
    place: Place = _WAITING
    times_overtaken: int = 0
    losses: int = 0  # of the backend, with this in flight
    has_failed: bool = False  # a call that held it did
    most_cost: float = math.inf  # of a call that holds it, once one has run out of memory
    search: Search | None = None

    def __repr__(self) -> str:
        return f"{self.number} ({self.key}{self.cost}{self.fault.value} of request {self.request.number})"


@dataclass(eq=False, slots=True)
class Request:
    """One ``submit``, by the books."""

    number: int
    items: list[Item] = field(default_factory=list)
    outcome: Outcome | None = None
    has_left: bool = False  # its caller did, whatever the batcher had made of it

    @property
    def cost(self) -> int:
        return cost_of(self.items)

    def __repr__(self) -> str:
        return f"request {self.number}"


@dataclass(eq=False, slots=True)
class Search:
    """For what made a batch fail."""

    items: Sequence[Item]
    further: int = 0  # calls, after the first that failed
    is_disturbed: bool = False  # by faults that are no item's
    suspects: set[Request] = field(default_factory=set)  # that failed with nobody else in the call

    @property
    def most(self) -> int:
        """How many further calls it may take."""
        doublings = (len(self.items) - 1).bit_length()
        culprits = sum(item.fault is Fault.POISON for item in self.items)
        return 2 * doublings if culprits == 1 and not self.is_disturbed else 4 * doublings + 4

    @property
    def is_spent(self) -> bool:
        """Whether what is not proven good by now may fail."""
        return self.further >= 4 * (len(self.items) - 1).bit_length() + 4


@dataclass(eq=False, slots=True)
class Call:
    """One call of ``fn``, by the books."""

    items: list[Item]
    cost: int
    bucket: int | None
    is_retry: bool
    began_s: float
    is_late: bool = False

    @property
    def key(self) -> str:
        return self.items[0].key


class Books:
    """What must be true of one batcher, by all that has happened to it."""

    def __init__(self, setup: Setup, clock: Callable[[], float]) -> None:
        self.setup = setup
        self.cap = math.inf if setup.max_batch_cost is None else setup.max_batch_cost
        self.max_items = math.inf if setup.max_batch_items is None else setup.max_batch_items
        self.clock = clock
        self.items: dict[int, Item] = {}
        self.requests: list[Request] = []  # that were accepted
        self.waiting: dict[Item, None] = {}  # in order of arrival
        self.again: dict[Item, None] = {}  # what failed and is to be run again
        self.unheard: set[Request] = set()  # whose callers left, which nobody may have noticed
        self.stale: list[Item] = []  # dropped since they failed, which nobody may have noticed either
        self.call: Call | None = None
        self.last: Call | None = None
        self.last_ending: Ending = "ok"
        self.batch_size = 0  # of the last call that was no retry
        self.further = 0  # calls after it
        self.longest_s = 0.0  # call so far that succeeded
        self.in_vain = 0
        self.too_much: dict[str, int] = {}  # the cost that ran out of memory, by key
        self.too_much_before: dict[str, int | None] = {}  # the same, before the present batch
        self.state: Literal["open", "stuck", "draining", "closed", "failed"] = "open"
        self.is_up = False  # between on_start and on_stop
        self.is_lost = False
        self.rebuilds: list[float] = []  # when
        self.life: Counter[str] = Counter()
        self.endings: Counter[Ending] = Counter()

    # ---- callers

    def expected_at_arrival(self, request: Request) -> set[str]:
        """What may become of a ``submit`` of ``request`` at this moment."""
        cost, bound = request.cost, self.setup.max_pending_cost
        if any(item.cost > self.cap for item in request.items):
            return {"InvalidInput"}
        if self.state != "open":
            return {"EncoderUnavailable"}
        if bound is None:
            return {"accepted"}
        if cost > bound:
            return {"InvalidInput"}
        least, most = (cost_of(items) + self.running_cost() for items in self.unanswered())
        return {
            *(["accepted"] if least + cost <= bound else []),
            *(["Overloaded"] if most + cost > bound else []),
        }

    def accept(self, request: Request) -> None:
        """It was queued."""
        self.requests.append(request)
        for item in request.items:
            self.items[item.number] = item
            self.waiting[item] = None

    def leave(self, request: Request) -> None:
        """Its caller leaves."""
        request.has_left = True
        if request.outcome is None:
            self.unheard.add(request)
            self._end(request, "left")

    def hear(self, request: Request) -> None:
        """The batcher has noticed that its caller left."""
        self.unheard.discard(request)

    def answered(self, request: Request, outcome: Outcome) -> None:
        """Its caller has heard of this outcome."""
        if request.outcome is None and outcome == "failed" and self._may_fail(request):
            self._end(request, "failed")
        expected = "left" if request.has_left else request.outcome or "not decided"
        assert outcome == expected, f"{request} got {outcome}, and is {expected}"

    # ---- calls

    def begin_call(self, numbers: Sequence[int], bucket: int | None) -> None:
        """``fn`` is called with these items."""
        items = [self.items[number] for number in numbers]
        assert self.call is None, "two calls at once"
        assert self.is_up, "a call before on_start or after on_stop"
        assert not self.is_lost, "a call of a lost backend"
        assert items, "an empty call"
        assert len(set(items)) == len(items), f"an item twice in one call: {items}"
        for item in items:
            ended = item.request.outcome
            assert item.place is not _GONE, f"item {item} reached fn after its request was {ended}"
            assert item.place in (_WAITING, _AGAIN), f"item {item} is {item.place.value} and was called again"
        is_retry = items[0].place is _AGAIN
        assert all((item.place is _AGAIN) is is_retry for item in items), f"what failed and others: {items}"
        self.call = Call(items, cost_of(items), bucket, is_retry, self.clock())
        self._check_limits(self.call)
        if is_retry:
            self._check_retry(self.call)
        else:
            self.nothing_again()
            self._check_order(self.call)
            self.batch_size, self.further = len(items), 0
        for item in items:
            item.place = _RUNNING
            self.waiting.pop(item, None)
            self.again.pop(item, None)

    def end_call(self, ending: Ending, *, is_transient: bool = False) -> None:
        """How the call ended; ``is_transient``: by no fault of its items. Refused items end it well."""
        assert self.call is not None
        call, self.last, self.last_ending, self.call = self.call, self.call, ending, None
        self.endings[ending] += 1
        self.life["back"] += call.is_late
        if self.state == "stuck":
            self.state = "open"
        if ending == "ok":
            self._answer(call)
        else:
            self._fail(call, ending, is_transient)
        if ending == "lost":
            self.lose()

    def nothing_again(self) -> None:
        """Nothing is run again any more: whoever still had items that were to be has failed, if it may."""
        for request in {item.request: None for item in self.again}:
            assert self._may_fail(request), f"items of {request} were neither run again nor answered"
            self._end(request, "failed")
        self.stale.clear()
        self.too_much_before.clear()

    def _answer(self, call: Call) -> None:
        self.in_vain = 0
        self.longest_s = max(self.longest_s, self.clock() - call.began_s)
        for item in call.items:
            request = item.request
            item.place = _DONE
            if item.fault is Fault.REFUSED:
                item.has_failed = True
                self._end(request, "failed")
            elif all(other.place is _DONE for other in request.items):
                self._end(request, "ok")
        if call.cost >= self.too_much.get(call.key, math.inf):  # so there is more memory now
            del self.too_much[call.key]
            self._allow_any_cost()

    def _fail(self, call: Call, ending: Ending, is_transient: bool) -> None:
        """Blame whom the call proves guilty; the others are to be run again, if anything may be."""
        live = [item for item in call.items if item.request.outcome is None]
        for item in call.items:
            item.place = _AGAIN if item in live else _GONE
            item.has_failed = True
        self.again |= dict.fromkeys(live)
        self.stale += [item for item in call.items if item not in live]
        search = call.items[0].search
        if search is not None and (is_transient or ending != "failed"):
            search.is_disturbed = True
        may_repeat = self.setup.isolate and self.state != "closed"
        guilty = live if len(call.items) == 1 else []
        if ending == "lost":
            for item in live:
                item.losses += 1
            guilty = [item for item in live if item.losses > 1]
        elif ending == "out_of_memory":
            self._remember(call)
        else:
            may_repeat = may_repeat and self._is_to_be_split(call, is_transient)
        for item in guilty if may_repeat else live:
            self._end(item.request, "failed")

    def _is_to_be_split(self, call: Call, is_transient: bool) -> bool:
        requests = {item.request for item in call.items}
        search = call.items[0].search
        if search is None:
            if len(requests) == 1 or self.in_vain >= MOST_IN_VAIN:
                return False
            self.in_vain += 1
            search = Search(call.items, is_disturbed=is_transient)
            for item in call.items:
                item.search = search
        if len(requests) == 1:
            search.suspects |= requests
        return True

    def _may_fail(self, request: Request) -> bool:
        """Whether an undecided request may be told that it failed.

        Because of its own items, or because no further call may be spent on finding out.
        """
        searches = {item.search for item in request.items if item.place is _AGAIN}
        return any(search and (search.is_spent or request in search.suspects) for search in searches)

    def _remember(self, call: Call) -> None:
        key = call.key
        if len(call.items) > 1:
            self.too_much_before.setdefault(key, self.too_much.get(key))
            self.too_much[key] = call.cost
            for item in call.items:
                item.most_cost = call.cost // 2
        elif key in self.too_much_before:  # so it was this item, which says nothing about the others
            before = self.too_much_before.pop(key)
            if before is None:
                self.too_much.pop(key, None)
            else:
                self.too_much[key] = before
            self._allow_any_cost()

    def _allow_any_cost(self) -> None:
        for item in self.again:
            item.most_cost = math.inf

    def _check_limits(self, call: Call) -> None:
        items, cost, bucket = call.items, call.cost, call.bucket
        assert len({item.key for item in items}) == 1, f"a call mixes keys: {items}"
        assert cost <= self.cap, f"a call costs {cost}, more than {self.cap}: {items}"
        assert len(items) <= self.max_items, f"a call of more than {self.max_items} items: {items}"
        rung = min((rung for rung in self.setup.buckets if rung >= cost), default=None)
        assert bucket == rung, f"target_bucket={bucket} for a cost of {cost}"

    def _check_retry(self, call: Call) -> None:
        items, cost, search = call.items, call.cost, call.items[0].search
        assert all(item.search is search for item in items), f"pieces of two batches: {items}"
        is_small = len(items) == 1 or all(cost <= item.most_cost for item in items)
        assert is_small, f"{items} are run again at a cost of {cost} after running out of memory"
        if search is not None:
            search.further += 1
            assert search.further <= search.most, (
                f"{search.further} further calls for a batch of {len(search.items)}, at most {search.most}"
            )
        self.further += 1
        most = 3 * self.batch_size + 4 * (self.batch_size - 1).bit_length() + 4
        assert self.further <= most, f"{self.further} further calls for a batch of {self.batch_size}"

    def _check_order(self, call: Call) -> None:
        """Led by who has waited longest, no emptier than first come first served would be, and overtaking
        nobody too often.
        """
        items = call.items
        head = next(iter(self.waiting))
        assert items[0] is head, f"item {head} has waited longest and does not lead {items}"
        is_small = len(items) == 1 or call.cost < self.too_much.get(call.key, math.inf)
        assert is_small, f"{items} cost as much as what ran out of memory"
        lane = [item for item in self.waiting if item.key == call.key]
        assert [item for item in lane if item in items] == items, f"{items} are not in order of arrival"
        first_come = 0
        for number, item in enumerate(lane):
            if first_come + item.cost > self.cap or number == self.max_items:
                break
            first_come += item.cost
        # How much memory there is for a batch of this key is not ours to say, nor who is known to have left.
        is_full = call.cost >= first_come or call.key in self.too_much or bool(self.unheard)
        assert is_full, f"first come, first served costs {first_come}, more than {items}"
        self._overtake(item for item in lane[: lane.index(items[-1])] if item not in items)

    def _overtake(self, passed: Iterable[Item]) -> None:
        for item in passed:
            item.times_overtaken += 1
            times = item.times_overtaken
            assert times <= MOST_OVERTAKEN, f"item {item} was overtaken by {times} batches"

    # ---- life

    def started(self) -> None:
        """``on_start`` has succeeded."""
        assert not self.is_up, "on_start again without on_stop"
        self.life["rebuilt"] += self.is_lost
        self.is_up, self.is_lost = True, False

    def stopped(self) -> None:
        """``on_stop`` is called."""
        assert self.is_up, "on_stop without on_start"
        assert self.call is None, "on_stop while a call runs"
        self.is_up = False

    def lose(self) -> None:
        """The backend is lost, or could not be built again, or its thread has died."""
        self.is_lost = True
        self.life["lost"] += 1

    def hand_on(self) -> bool | None:
        """A thread is about to end: whether a fresh one is to build the backend again.

        If not, and unless it was closed, nobody is served any more. None: as it likes, see ``handed_on``.
        """
        if not self.is_lost or self.state == "closed":
            return False
        now_s = self.clock()
        self.rebuilds = [then_s for then_s in self.rebuilds if now_s - then_s < REBUILD_WINDOW_S]
        if self.state == "draining" and not (self.waiting or self.again):
            return None  # for it may still have to notice that nobody is left
        goes_on = len(self.rebuilds) < self.setup.max_rebuilds
        self.handed_on(goes_on, has_failed=not goes_on)
        return goes_on

    def handed_on(self, goes_on: bool, *, has_failed: bool) -> None:
        """What was done about a lost backend."""
        if goes_on:
            self.rebuilds.append(self.clock())
        else:
            self.state = "failed" if has_failed else "closed"
            self.life["failed"] += has_failed
            self._drop()

    def close(self, drain: bool) -> None:
        """Shutdown."""
        if self.state not in ("closed", "failed"):
            self.state = "draining" if drain else "closed"
            if not drain:
                self._drop()

    def watch(self) -> float | None:
        """Look for a call that is late; after how many seconds to look again at the latest."""
        timeout_s, call = self.setup.forward_timeout_s, self.call
        if timeout_s is None or call is None or call.is_late:
            return timeout_s
        left_s = call.began_s + timeout_s - self.clock()
        if left_s > 0:
            return left_s
        call.is_late = True
        self.life["stuck"] += 1
        for item in call.items:
            self._end(item.request, "deadline")
        self._drop()
        if self.state == "open":
            self.state = "stuck"
        return timeout_s

    def _end(self, request: Request, outcome: Outcome) -> None:
        """End ``request``, if it has not ended; what is left of it reaches ``fn`` no more."""
        if request.outcome is None:
            request.outcome = outcome
            for item in request.items:
                self.waiting.pop(item, None)
                if item in self.again:
                    del self.again[item]
                    self.stale.append(item)
                if item.place in (_WAITING, _AGAIN):
                    item.place = _GONE

    def _drop(self) -> None:
        """Whoever waits, also to be run again, is not served any more."""
        for item in [*self.waiting, *self.again]:
            self._end(item.request, "unavailable")
        self.stale.clear()
        self.unheard.clear()

    # ---- what can be asked

    def running_cost(self) -> int:
        """Of the call that runs."""
        return 0 if self.call is None else self.call.cost

    def unanswered(self) -> tuple[list[Item], list[Item]]:
        """What waits, or waits to be run again: those that must count as such, and all that may.

        Who is no longer looked for has failed, and may not have heard of it.
        """
        sought = [item for item in self.again if item.search is None or not item.search.is_spent]
        unheard = [item for request in self.unheard for item in request.items if item.place is _GONE]
        may = dict.fromkeys([*self.waiting, *self.again, *unheard, *self.stale])
        return [*self.waiting, *sought], list(may)

    def check_pending(self, items: int, cost: int, running_cost: int) -> None:
        """What the batcher says of itself, and its bound."""
        waiting, running = cost_of(self.waiting) + cost_of(self.again), self.running_cost()
        if (items, cost) != (len(self.waiting) + len(self.again), waiting):
            must, may = self.unanswered()
            assert len(must) <= items <= len(may), f"{items} items are said to wait, and {must} do"
            assert cost_of(must) <= cost <= cost_of(may), f"a cost of {cost} is said to wait, and {must} do"
        assert running_cost == running, f"a cost of {running_cost} is said to run, and {running} does"
        bound, pending = self.setup.max_pending_cost, waiting + running
        assert bound is None or pending <= bound, f"a cost of {pending} is pending, more than {bound}"

    def check_asleep(self, for_s: float | None) -> None:
        """The thread sleeps for so long, or until it is woken."""
        assert not self.again, f"asleep while {list(self.again)} are to be run again"
        assert self.state == "open", f"asleep when {self.state}"
        if self.waiting:
            oldest = next(iter(self.waiting))
            left_s = self.longest_s  # a hold that saves a call pays no longer than the call would have taken
            if self.setup.max_wait_s is not None:
                left_s = oldest.arrived_s + self.setup.max_wait_s - self.clock()
            assert for_s is not None, f"asleep while {list(self.waiting)} wait"
            assert for_s <= left_s, f"asleep for {for_s} s while {oldest} waits, {left_s} s too long"
            assert self.unheard or not self._fills_a_batch(oldest.key), "asleep while a full batch waits"

    def _fills_a_batch(self, key: str) -> bool:
        lane = [item for item in self.waiting if item.key == key]
        return cost_of(lane) >= self.cap or len(lane) >= self.max_items


def cost_of(items: Iterable[Item]) -> int:
    """Summed."""
    return sum([item.cost for item in items])
