"""How long the next batch waits for company. Pure: no clock and no thread; fed by the actor.

A call costs a fixed part whatever is in it, so two small batches cost one fixed part more than the two
together. Callers that were just answered tend to come back: where the rest of them is expected sooner than a
call's fixed part takes, it pays to wait for them. What is expected is measured, for each key: how long calls
of a cost take (``Curve``), and when after an answer the next arrivals come (``Returns``).

Nobody is held where nobody is expected, nor longer than a call's fixed part, nor in a batch that is full.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Hashable
from typing import NamedTuple

from retinue.batching.planner import Limits

__all__ = ["Curve", "Held", "Hold", "Returns", "remaining_hold_s"]

_SHORTEST_S = 50e-6  # less than a thread needs to wake up
#: Ends of the spans of time after an answer in which arrivals are counted, each longer by half than the last.
_SPANS_S = tuple(_SHORTEST_S * 1.5**number for number in range(28))  # to 2.8 s
_WORTH = 1.03  # how much faster a hold must promise to be
_MAX_KEYS = 256  # remembered
_UNKNOWN_S = 1.0  # what anything takes before the first call has ended


def remaining_hold_s(*, oldest_wait_s: float, max_wait_s: float, full: bool) -> float:
    """Seconds that the next batch may still wait for company where ``max_wait_s`` is set; 0 when it is due.

    ``oldest_wait_s``: how long its oldest item has waited. ``full``: whether more company could not join it.
    """
    return 0.0 if full else max(0.0, max_wait_s - oldest_wait_s)


class Held(NamedTuple):
    """What the next batch waits for: so many seconds, or until so much is in it. (0, …): for nothing."""

    seconds: float
    cost: float


_DUE = Held(0.0, 0.0)


class Curve:
    """How long a call of a cost takes: a line, fitted by least squares that forget.

    A call counts a fiftieth of all before it. One that took more than twice what was expected counts as
    twice: a pause of the machine hardly bends the line, a device that has become slow soon does.
    """

    __slots__ = ("_calls", "_cost", "_cost_s", "_costs", "_seconds", "fixed_s", "per_cost_s")

    def __init__(self) -> None:
        self.fixed_s = 0.0  #: what a call takes whatever is in it
        self.per_cost_s = 0.0  #: what each unit of cost adds
        self._calls = self._cost = self._seconds = self._costs = self._cost_s = 0.0  # sums that fade

    def __bool__(self) -> bool:
        return self._calls > 0

    def seconds(self, cost: float) -> float:
        """How long a call of ``cost`` takes."""
        return self.fixed_s + self.per_cost_s * cost

    def note(self, cost: float, duration_s: float) -> None:
        """A call of ``cost`` took so long."""
        if self._calls > 4:  # no sooner: the first calls of a device are slow
            duration_s = min(duration_s, 2 * self.seconds(cost))
        kept = 0.98
        self._calls = calls = self._calls * kept + 1
        self._cost = self._cost * kept + cost
        self._seconds = self._seconds * kept + duration_s
        self._costs = self._costs * kept + cost * cost
        self._cost_s = self._cost_s * kept + cost * duration_s
        mean, mean_s = self._cost / calls, self._seconds / calls
        spread = self._costs / calls - mean * mean
        if spread > (mean / 10) ** 2:
            slope = (self._cost_s / calls - mean * mean_s) / spread
            self.per_cost_s = min(max(0.0, slope), mean_s / mean)
            self.fixed_s = max(0.0, mean_s - self.per_cost_s * mean)
        elif expected_s := self.seconds(mean):  # one cost alone cannot tell the two parts from each other
            self.fixed_s *= mean_s / expected_s
            self.per_cost_s *= mean_s / expected_s
        else:
            self.fixed_s = mean_s / 2
            self.per_cost_s = mean_s / 2 / mean


class Returns:
    """When arrivals come after an answer: for each span of time, their cost per cost that was answered.

    Counted from one answer to the next, whoever arrives; an answer counts a tenth of all before it.
    """

    __slots__ = ("_answered", "_arrived", "_by_end")

    def __init__(self) -> None:
        self._answered = [0.0] * len(_SPANS_S)
        self._arrived = [0.0] * len(_SPANS_S)
        self._by_end = [0.0] * (len(_SPANS_S) + 1)  # of all up to the beginning of a span

    def note(self, answered: float, lasted_s: float, times_s: list[float], costs: list[int]) -> None:
        """After an answer of this cost, ``costs`` arrived at ``times_s`` (increasing) within ``lasted_s``."""
        up_to = [0, *itertools.accumulate(costs)]
        before = 0
        for span, end_s in enumerate(_SPANS_S):
            if end_s > lasted_s:  # it was not seen to its end
                break
            until = up_to[bisect_left(times_s, end_s)]
            self._answered[span] = self._answered[span] * 0.9 + answered
            self._arrived[span] = self._arrived[span] * 0.9 + until - before
            before = until
        shares = (arrived / (all_ or 1) for arrived, all_ in zip(self._arrived, self._answered, strict=True))
        self._by_end = [0.0, *itertools.accumulate(shares)]

    def until(self, after_s: float) -> float:
        """Cost that arrives within ``after_s`` of an answer, per cost that was answered."""
        span = bisect_right(_SPANS_S, after_s)
        if span == len(_SPANS_S):
            return self._by_end[-1]
        began_s = _SPANS_S[span - 1] if span else 0.0
        before, by_end = self._by_end[span : span + 2]
        return before + (by_end - before) * (after_s - began_s) / (_SPANS_S[span] - began_s)


class _Key:
    """What is known of one key."""

    __slots__ = ("answered", "answered_s", "costs", "curve", "returns", "times_s", "unit")

    def __init__(self) -> None:
        self.curve = Curve()
        self.returns = Returns()
        self.answered_s = -math.inf  # when its last call did
        self.answered = 0.0  # cost of that
        self.times_s: list[float] = []  # of arrivals since, counted from then
        self.costs: list[int] = []
        self.unit = 1.0  # mean cost of an arrival


class Hold:
    """Decides how long the next batch waits for company, and tells how long what waits will take."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._most = math.inf if limits.max_batch_cost is None else limits.max_batch_cost
        self._all = Curve()
        self._keys: dict[Hashable, _Key] = {}
        self._since_s: float | None = None  # when the present hold began

    # ---- what happened

    def arrived(self, key: Hashable, arrived_s: float, cost: int) -> None:
        """A cost of ``key`` did; to be told in order."""
        known = self._of(key)
        if known is not None and known.curve.fixed_s > _SHORTEST_S:
            known.times_s.append(arrived_s - known.answered_s)
            known.costs.append(cost)

    def called(self, key: Hashable, cost: int, duration_s: float, ended_s: float, *, succeeded: bool) -> None:
        """A call has ended, and who was in it is being answered; of failed ones nothing is learnt."""
        self._since_s = None
        known = self._of(key) or self._first_of(key)
        if succeeded:
            real = self._real(cost)
            known.curve.note(real, duration_s)
            self._all.note(real, duration_s)
        if known.costs:
            known.unit = sum(known.costs) / len(known.costs)
        if known.answered and known.curve.fixed_s > _SHORTEST_S:
            known.returns.note(known.answered, ended_s - known.answered_s, known.times_s, known.costs)
        known.answered, known.answered_s = (cost if succeeded else 0.0), ended_s
        known.times_s, known.costs = [], []

    def _of(self, key: Hashable) -> _Key | None:
        try:
            return self._keys.get(key)
        except Exception:  # a key that cannot be compared: no batch may be lost for what is only an estimate
            self._keys.clear()
            return None

    def _first_of(self, key: Hashable) -> _Key:
        if len(self._keys) == _MAX_KEYS:
            del self._keys[next(iter(self._keys))]
        known = _Key()
        with contextlib.suppress(Exception):
            self._keys[key] = known
        return known

    # ---- what to do

    def decide(self, key: Hashable, waiting: int, most: float, now_s: float) -> Held:
        """How long the next batch waits, in which ``waiting`` of ``key`` would be; ``most`` fills it.

        To be asked again when that time is over, or when so much waits.
        """
        known = self._of(key)
        if known is None or waiting >= most or not known.answered:
            return _DUE
        if self._since_s is None:
            self._since_s = now_s
        patience_s = self._since_s + known.curve.fixed_s - now_s
        if patience_s <= _SHORTEST_S:
            return _DUE
        return self._best(known, waiting, most, now_s - known.answered_s, patience_s)

    def _best(self, known: _Key, waiting: int, most: float, since_s: float, patience_s: float) -> Held:
        """The hold that serves soonest all that waits, or comes while a call that began now would run."""
        until = known.returns.until
        arrived, whole = until(since_s), until(math.inf)
        # Whoever came already is not waited for, which is all that a caller who is alone ever sees.
        missing = min(1.0, whole) * known.answered - sum(known.costs)
        if missing <= 0 or whole <= arrived:
            return _DUE

        def came(after_s: float) -> float:
            return missing * (until(since_s + after_s) - arrived) / (whole - arrived)

        def served_s(hold_s: float) -> tuple[float, float]:
            cost = min(most, waiting + came(hold_s))
            late = everybody - cost
            likely = min(1.0, max(0.0, late / known.unit))  # that there is anybody who misses this call
            return hold_s + self._seconds(known, cost) + likely * self._seconds(known, late), cost

        everybody = waiting + came(self._seconds(known, waiting))
        best_s, held = served_s(0.0)[0] / _WORTH, _DUE
        for end_s in _SPANS_S[bisect_right(_SPANS_S, since_s + _SHORTEST_S) :]:
            hold_s = end_s - since_s
            if hold_s > patience_s:
                break
            promised_s, cost = served_s(hold_s)
            if promised_s < best_s:
                best_s, held = promised_s, Held(hold_s, cost)
        return held

    def _seconds(self, known: _Key, cost: float) -> float:
        return known.curve.seconds(self._real(min(cost, self._most)))

    def _real(self, cost: float) -> float:
        """What a call of ``cost`` costs: where graphs have fixed sizes, that of the one that it runs in."""
        return self._limits.rung(cost) or cost

    def seconds_for(self, cost: float) -> float:
        """How long it takes to serve ``cost``, of whatever keys, in calls as full as they may be."""
        if not self._all:
            return _UNKNOWN_S
        if math.isinf(self._most):
            return self._all.seconds(cost)
        full, rest = divmod(cost, self._most)
        return full * self._all.seconds(self._most) + (self._all.seconds(self._real(rest)) if rest else 0.0)
