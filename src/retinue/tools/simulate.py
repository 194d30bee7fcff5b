"""``retinue simulate``: the batcher on a virtual clock, under one policy after another.

What decides is the real ``Actor`` with its planner and its hold. Simulated are the device, the callers with
the event loop that they share, and what a thread needs to wake. The same seed gives the same figures.
"""

from __future__ import annotations

import heapq
import itertools
import math
import operator
import queue
import random
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import fmean, median
from typing import Any, NamedTuple, Protocol, cast

from retinue.batching.actor import Actor, State
from retinue.batching.planner import Limits
from retinue.batching.recording import Trace
from retinue.batching.records import BatchRecord, RequestRecord
from retinue.batching.request import Request
from retinue.errors import InvalidInput

__all__ = [
    "Callers",
    "Device",
    "Figures",
    "Line",
    "Load",
    "Poisson",
    "Policy",
    "Replay",
    "Row",
    "World",
    "capped",
    "figures",
    "notes",
    "plain",
    "policies",
    "recorded",
    "simulate",
    "table",
]

# What was measured of an idle thread and of asyncio, on a virtual CPU.
_WAKE_S = 20e-6  # until a thread that is woken runs
_LATE_S = 80e-6  # what a thread's timer is late
_ANSWER_S = 50e-6  # until the event loop hears of an answer
_TURN_S = 6e-6  # of the event loop, for each caller that it wakes
_SWITCH_S = 5e-3  # of the interpreter, between threads that are busy
_WARM_UP = 0.2  # of the time that callers ask
_FEW_CALLS = 20  # too few for a line of their own
_MANY_CALLS = 10_000  # enough for any
_ROUNDS = 30


# ---- what is compared


@dataclass(frozen=True)
class Policy:
    """Limits and a wait: ``max_wait_s`` as for ``ThreadedMicroBatcher``."""

    limits: Limits
    max_wait_s: float | None = None

    @property
    def name(self) -> str:
        """For people."""
        if self.max_wait_s is None:
            return "measured"
        return f"wait {self.max_wait_s * 1e3:g} ms" if self.max_wait_s else "eager"


def capped(limits: Limits, max_batch_cost: int) -> Limits:
    """``limits`` with another cap: it is the last of the buckets, if there are any, and ends those above."""
    below = (rung for rung in limits.buckets if rung < max_batch_cost)
    return Limits(max_batch_cost, limits.max_batch_items, (*below, max_batch_cost) if limits.buckets else ())


def policies(limits: Iterable[Limits], waits_s: Iterable[float] = ()) -> list[Policy]:
    """The measured hold, eager, and ``waits_s``, each under all of ``limits``."""
    waits = dict.fromkeys((None, 0.0, *waits_s))
    return [Policy(choice, wait_s) for choice in dict.fromkeys(limits) for wait_s in waits]


@dataclass(frozen=True)
class Figures:
    """What a policy made of a load. Latencies are those of requests that were answered."""

    requests: int
    refused: int  #: for an item that costs more than a batch may
    requests_per_s: float
    cost_per_s: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    batch_items: float  #: mean
    batch_cost: float  #: mean
    fill: float | None  #: mean of cost over ``max_batch_cost``; None without such a cap
    busy: float  #: share of the time that the device was
    held_ms: float  #: mean of what batches were held for


def figures(
    requests: Sequence[RequestRecord],
    batches: Sequence[BatchRecord],
    limits: Limits,
    lasted_s: float,
    refused: int = 0,
) -> Figures:
    """The figures of what ended in ``lasted_s`` under ``limits``; ``ValueError`` if nothing was answered."""
    answered = [request for request in requests if request.outcome == "ok"]
    if not (answered and batches):
        raise ValueError(f"no request was answered under max_batch_cost={limits.max_batch_cost}")
    latencies_ms = sorted(request.total_s * 1e3 for request in answered)
    p50, p90, p99 = (latencies_ms[int(share * (len(latencies_ms) - 1))] for share in (0.5, 0.9, 0.99))
    batch_cost = fmean(batch.cost for batch in batches)
    return Figures(
        requests=len(answered),
        refused=refused,
        requests_per_s=len(answered) / lasted_s,
        cost_per_s=sum(request.cost for request in answered) / lasted_s,
        p50_ms=p50,
        p90_ms=p90,
        p99_ms=p99,
        batch_items=fmean(batch.items for batch in batches),
        batch_cost=batch_cost,
        fill=limits.max_batch_cost and batch_cost / limits.max_batch_cost,
        busy=sum(batch.duration_s for batch in batches) / lasted_s,
        held_ms=fmean(batch.held_s for batch in batches) * 1e3,
    )


def recorded(trace: Trace) -> Figures:
    """What was so in truth."""
    began_s = min((request.arrived_s for request in trace.requests), default=0.0)
    ended_s = max((request.arrived_s + request.total_s for request in trace.requests), default=0.0)
    return figures(trace.requests, trace.batches, trace.limits, ended_s - began_s)


def notes(trace: Trace, device: Device) -> list[str]:
    """What to know of a trace beside its figures, in lines."""
    costs = sorted(batch.cost for batch in trace.batches)
    found = [
        f"{len(trace.requests)} requests, {len(costs)} calls that cost {costs[0]} to {costs[-1]}: "
        f"a call takes {device.line.fixed_s * 1e3:.3g} ms, and {device.line.per_cost_s * 1e3:.3g} ms "
        "for each unit of cost; of dearer calls nothing is known but that"
    ]
    if trace.torn:
        found.append(f"{trace.torn} lines of the file are torn, as a crash leaves them, and were left out")
    return found


# ---- the device


def _sum_of_products(left: Iterable[float], right: Iterable[float]) -> float:
    """Of two sequences of one length; in ``math`` since Python 3.12."""
    return float(sum(map(operator.mul, left, right)))


@dataclass(frozen=True)
class Line:
    """How long a call takes: a fixed part, and so much for each unit of its cost."""

    fixed_s: float
    per_cost_s: float

    def __post_init__(self) -> None:
        if not (self.fixed_s >= 0 and self.per_cost_s >= 0 and self.fixed_s + self.per_cost_s > 0):
            raise ValueError(f"a call takes some time, and no part of it is negative: {self}")

    def __call__(self, cost: float) -> float:
        return self.fixed_s + self.per_cost_s * cost

    @classmethod
    def through(cls, calls: Sequence[tuple[float, float]]) -> Line:
        """The line with the least sum of distances from cost and duration of ``calls``.

        So what pulls at it is how many calls lie above and below, and not how far: no pause of the machine
        bends it.
        """
        calls = calls[:: 1 + len(calls) // _MANY_CALLS]
        typical_s = median(duration_s for _, duration_s in calls)
        if len({cost for cost, _ in calls}) == 1:  # which cannot tell the two parts from each other
            return cls(typical_s / 2, typical_s / 2 / calls[0][0])
        line = cls(typical_s, 0.0)
        weights = [1.0] * len(calls)
        for _ in range(_ROUNDS):  # of least squares, in which a call counts the less the farther off it is
            line = cls._least_squares(calls, weights)
            weights = [1 / max(abs(duration_s - line(cost)), typical_s / 1e4) for cost, duration_s in calls]
        return line

    @classmethod
    def _least_squares(cls, calls: Sequence[tuple[float, float]], weights: Sequence[float]) -> Line:
        costs, durations_s = zip(*calls, strict=True)
        all_ = sum(weights)
        mean, mean_s = _sum_of_products(weights, costs) / all_, _sum_of_products(weights, durations_s) / all_
        spread = sum(weight * (cost - mean) ** 2 for weight, cost in zip(weights, costs, strict=True))
        slope = _sum_of_products(weights, [(cost - mean) * (s - mean_s) for cost, s in calls]) / (
            spread or 1.0
        )
        slope = min(max(0.0, slope), mean_s / mean)
        return cls(max(0.0, mean_s - slope * mean), slope)


@dataclass(frozen=True)
class Device:
    """How long calls take: by ``line``, or the one that a key has in ``of_key``.

    ``extras_s``, ``jitter_s``: a call takes one of the first more than that, and up to the second.
    """

    line: Line
    of_key: dict[Hashable, Line] = field(default_factory=dict)
    extras_s: Sequence[float] = (0.0,)
    jitter_s: float = 0.0

    def seconds(self, key: Hashable, cost: float, rng: random.Random) -> float:
        """How long a call of ``cost`` takes this time."""
        usual_s = self.of_key.get(key, self.line)(cost)
        return max(0.0, usual_s + rng.choice(self.extras_s)) + rng.uniform(0.0, self.jitter_s)

    @classmethod
    def of(cls, batches: Iterable[BatchRecord]) -> Device:
        """As recorded: a line for each key that had some calls, and by how much calls were off it.

        ``ValueError`` if no call has succeeded. With buckets, a call costs what its bucket does.
        """
        by_key: dict[Hashable, list[tuple[float, float]]] = {}
        for one in batches:
            if one.outcome == "ok":
                by_key.setdefault(one.key, []).append((one.bucket or one.cost, one.duration_s))
        if not by_key:
            raise ValueError("no call has succeeded, so nothing tells how long one takes")
        line = Line.through([call for calls in by_key.values() for call in calls])
        of_key = {key: Line.through(calls) for key, calls in by_key.items() if len(calls) >= _FEW_CALLS}
        extras_s = [
            duration_s - of_key.get(key, line)(cost)
            for key, calls in by_key.items()
            for cost, duration_s in calls
        ]
        return cls(line, of_key, extras_s)


# ---- who asks


class Load(Protocol):
    """What comes to the batcher."""

    @property
    def warm_up_s(self) -> float:
        """For so long it does not count what happens."""

    def begin(self, world: World) -> None:
        """Arrange for what is to come."""


@dataclass(frozen=True, kw_only=True)
class _Synthetic:
    """``items``: of a request, each with one of ``costs``. ``for_s``: for so long requests come."""

    items: int = 1
    costs: Sequence[int] = (1,)
    for_s: float = 5.0

    def __post_init__(self) -> None:
        if self.items < 1 or not self.costs or not 0 < self.for_s < math.inf:
            raise ValueError(f"a request has items, these have costs, and all comes to an end: {self}")

    @property
    def warm_up_s(self) -> float:
        return self.for_s * _WARM_UP

    def draw(self, rng: random.Random) -> list[int]:
        """The costs of a request's items."""
        return rng.choices(self.costs, k=self.items)


@dataclass(frozen=True, kw_only=True)
class Callers(_Synthetic):
    """A closed loop: ``count`` callers, each of which asks anew up to ``think_s`` after its answer."""

    count: int
    think_s: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.count < 1 or self.think_s < 0:
            raise ValueError(f"there must be callers, who take time to think or none: {self}")

    def begin(self, world: World) -> None:
        """Of ``Load``."""

        def ask() -> None:
            if world.now_s < self.for_s:
                world.ask(self.draw(world.rng), then=answered)

        def answered() -> None:
            world.at(world.now_s + world.rng.uniform(0.0, self.think_s), ask)

        for _ in range(self.count):
            world.turn(ask)


@dataclass(frozen=True, kw_only=True)
class Poisson(_Synthetic):
    """An open loop: ``rate`` requests per second, whatever becomes of them."""

    rate: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.rate > 0:
            raise ValueError(f"rate must be more than 0, got {self.rate}")

    def begin(self, world: World) -> None:
        """Of ``Load``."""

        def ask() -> None:
            world.ask(self.draw(world.rng))
            come()

        def come() -> None:
            next_s = world.now_s + world.rng.expovariate(self.rate)
            if next_s < self.for_s:
                world.at(next_s, ask)

        come()


@dataclass(frozen=True)
class Replay:
    """The requests of a trace, at their times. Whoever left leaves when it did, unless it was answered."""

    requests: Sequence[RequestRecord]
    warm_up_s: float = 0.0

    def begin(self, world: World) -> None:
        """Of ``Load``."""
        requests = sorted(self.requests, key=lambda request: request.arrived_s)

        def come(number: int) -> None:
            request = requests[number]
            patience_s = request.total_s if request.outcome == "left" else None
            world.ask(request.costs, request.keys, patience_s=patience_s)
            expect(number + 1)

        def expect(number: int) -> None:
            if number < len(requests):
                world.at(requests[number].arrived_s - requests[0].arrived_s, partial(come, number))

        expect(0)


# ---- the simulation


class World:
    """Time, the device, and the event loop of the callers, around an ``Actor``. It is used once."""

    def __init__(self, device: Device, policy: Policy, seed: int) -> None:
        self.now_s = 0.0
        self.rng = random.Random(seed)  # of the callers
        self._device = device
        self._device_rng = random.Random(seed + 1)
        self._limits = policy.limits
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self.loop_free_s = 0.0
        self.refused = 0
        self.log = _Log(self)
        self.actor = Actor(
            self._call,
            policy.limits,
            max_wait_s=policy.max_wait_s,
            observer=self.log,
            clock=lambda: self.now_s,
            alarm=_Alarm(self),
        )

    def at(self, when_s: float, what: Callable[[], object]) -> None:
        """Let it happen then."""
        heapq.heappush(self._events, (when_s, next(self._numbers), what))

    def ask(
        self,
        costs: Sequence[int],
        keys: Sequence[Hashable] | None = None,
        *,
        then: Callable[[], object] | None = None,
        patience_s: float | None = None,
    ) -> None:
        """Send a request now; ``then`` when its caller runs again. The caller leaves after ``patience_s``."""
        try:
            for index, cost in enumerate(costs):
                self._limits.admit(cost, index, len(costs))
        except InvalidInput:
            self.refused += 1
            return
        request = Request.to_wake(cast(Any, _Answer(self, then)))
        items = list(zip(keys or itertools.repeat(None), costs, strict=False))
        self.actor.enqueue(request.loop, items, costs, keys, request)
        if patience_s is not None:
            self.at(self.now_s + patience_s, partial(self.actor.withdraw, request))

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: object) -> None:
        """Of an event loop."""
        self.at(self.now_s + _ANSWER_S, partial(callback, *args))

    def turn(self, then: Callable[[], object]) -> None:
        """Let the event loop do it as soon as it has done what it has to do before."""
        self.loop_free_s = max(self.now_s, self.loop_free_s) + _TURN_S
        self.at(self.loop_free_s, then)

    def pass_until(self, until_s: float, stop: Callable[[], bool] = lambda: False) -> bool:
        """Let happen what happens until then, or until ``stop()``; whether nothing is left to happen."""
        while not stop():
            if not self._events or self._events[0][0] > until_s:
                if until_s < math.inf:
                    self.now_s = until_s
                return not self._events
            self.now_s, _, what = heapq.heappop(self._events)
            what()
        return False

    def _call(self, items: list[tuple[Hashable, int]], target_bucket: int | None = None) -> list[Any]:
        cost = target_bucket or sum(cost for _, cost in items)
        self.pass_until(self.now_s + self._device.seconds(items[0][0], cost, self._device_rng))
        return items


class _Answer:
    """What a caller waits for, in the place of an ``asyncio.Future``."""

    __slots__ = ("_then", "_world")

    def __init__(self, world: World, then: Callable[[], object] | None) -> None:
        self._world, self._then = world, then

    def get_loop(self) -> World:
        return self._world

    def cancelled(self) -> bool:
        return False

    def set_result(self, _: None) -> None:
        if self._then is not None:
            self._world.turn(self._then)


class _Alarm(queue.SimpleQueue[None]):
    """What the actor thread sleeps on: while it does, time passes."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rings = False

    def put(self, item: None, block: bool = True, timeout: float | None = None) -> None:
        self._rings = True

    def get_nowait(self) -> None:
        if not self._rings:
            raise queue.Empty
        self._rings = False

    def get(self, block: bool = True, timeout: float | None = None) -> None:
        world = self._world
        until_s = math.inf if timeout is None else world.now_s + timeout
        is_over = world.pass_until(until_s, lambda: self._rings)
        if is_over and timeout is None:
            world.actor.close()  # nothing waits, and nobody comes any more
        woken_s = world.now_s + (_WAKE_S if self._rings else _LATE_S)
        # The event loop has the interpreter's lock until it has nothing to do, or for some time.
        world.pass_until(max(woken_s, min(world.loop_free_s, world.now_s + _SWITCH_S)))
        self._rings = False


class _Log:
    """An observer that keeps what counts: what ends after the first call to end after the warm-up."""

    def __init__(self, world: World) -> None:
        self.warm_up_s = 0.0
        self.has_failed = False
        self.requests: list[RequestRecord] = []
        self.batches: list[BatchRecord] = []
        self._world = world
        self._began_s: float | None = None
        self._ended_s = 0.0

    @property
    def lasted_s(self) -> float:
        """What it kept did, from call to call."""
        return self._ended_s - (self._began_s or 0.0)

    def on_batch(self, record: BatchRecord) -> None:
        self.has_failed |= record.outcome != "ok"
        if self._began_s is not None:
            self.batches.append(record)
            self._ended_s = self._world.now_s
        elif self._world.now_s >= self.warm_up_s:
            self._began_s = self._world.now_s

    def on_request(self, record: RequestRecord) -> None:
        if self.batches:
            self.requests.append(record)


def simulate(load: Load, device: Device, policy: Policy, seed: int = 0) -> Figures:
    """What ``policy`` makes of ``load`` on ``device``; ``ValueError`` if no request is answered."""
    world = World(device, policy, seed)
    world.log.warm_up_s = load.warm_up_s
    load.begin(world)
    world.actor.begin()
    # On a thread of its own: the actor takes whatever is raised on its thread, Ctrl-C too, for its fn's.
    threading.Thread(target=world.actor.run, daemon=True).start()
    world.actor.stopped.result()
    log = world.log
    if log.has_failed or world.actor.state is not State.CLOSED:
        raise RuntimeError("the simulation itself has failed; the log says how")
    return figures(log.requests, log.batches, policy.limits, log.lasted_s, world.refused)


# ---- telling


class Row(NamedTuple):
    """One line of a comparison."""

    policy: str
    limits: Limits
    figures: Figures


_COLUMNS = (
    ("requests/s", "requests_per_s", ".1f"),
    ("cost/s", "cost_per_s", ".0f"),
    ("p50 ms", "p50_ms", ".2f"),
    ("p90 ms", "p90_ms", ".2f"),
    ("p99 ms", "p99_ms", ".2f"),
    ("items", "batch_items", ".1f"),
    ("cost", "batch_cost", ".1f"),
    ("fill", "fill", ".0%"),
    ("busy", "busy", ".0%"),
    ("held ms", "held_ms", ".2f"),
    ("refused", "refused", "d"),
)


def table(rows: Iterable[Row]) -> str:
    """The rows as text in columns, with a line of titles."""
    lines = [["max_batch_cost", "policy", *(title for title, _, _ in _COLUMNS)]]
    for policy, limits, found in rows:
        values = ((getattr(found, name), form) for _, name, form in _COLUMNS)
        texts = ("-" if value is None else format(value, form) for value, form in values)
        lines.append([str(limits.max_batch_cost or "-"), policy, *texts])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)


def plain(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The rows for ``json``."""
    return [{"policy": row.policy, **asdict(row.limits), **asdict(row.figures)} for row in rows]
