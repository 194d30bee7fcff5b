"""Schedules: what callers, devices, clocks and operators do to a batcher, as a list of events.

A schedule is data: it prints as Python that can be pasted into a test. The items of a request are words such
as ``a3``: an item of key ``a`` and cost 3. A sign behind it says what is wrong with it: see ``Fault``.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias

#: Where a thread may be when others do something: in ``fn``, before it tells a loop, in an observer, in
#: ``on_start``, in ``on_stop``.
Point: TypeAlias = Literal["call", "tell", "record", "start", "stop"]
#: What a call may return in place of a list of one result per item.
Wrong: TypeAlias = Literal["too few", "too many", "none", "dict"]

LOOPS = 3


class Fault(Enum):
    """What an item does to every call that it is in."""

    NONE = ""
    POISON = "!"  # fn raises
    REFUSED = "?"  # fn returns Refused in its place
    HUGE = "#"  # it alone is out of memory
    LETHAL = "~"  # the backend is lost


class Spec(NamedTuple):
    """What is to be known of an item before it arrives."""

    key: str
    cost: int
    fault: Fault


@lru_cache(maxsize=4096)
def specs_of(items: str) -> tuple[Spec, ...]:
    """The items that these words name."""
    return tuple(map(_spec, items.split()))


def _spec(word: str) -> Spec:
    digits = word[1:].rstrip("!?#~")
    return Spec(word[0], int(digits), Fault(word[1 + len(digits) :]))


class _Shown:
    """Prints as the call that makes it, without what is as it would be anyway."""

    def __repr__(self) -> str:
        said = []
        for field in fields(self):  # type: ignore[arg-type]  # each of these is a dataclass
            value = getattr(self, field.name)
            if value != field.default:
                said.append(repr(value) if field.name in ("number", "items") else f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(said)})"


@dataclass(frozen=True, repr=False)
class Setup(_Shown):
    """The batcher that a schedule is about."""

    max_batch_cost: int | None = None
    max_batch_items: int | None = None
    buckets: tuple[int, ...] = ()
    max_wait_s: float | None = 0.0  # None: as long as is measured to pay
    max_pending_cost: int | None = None
    isolate: bool = True
    forward_timeout_s: float | None = None
    max_rebuilds: int = 3
    is_observed: bool = False


#: No sum of ticks is exactly so long.
REBUILD_WINDOW_S = 60.5


@dataclass(frozen=True, repr=False)
class Arrive(_Shown):
    """A caller submits ``items`` on event loop ``loop`` and leaves after ``patience_s``.

    ``bare``: no task runs its coroutine, so leaving is closing it, as the garbage collector does.
    """

    number: int
    items: str
    loop: int = 0
    patience_s: float | None = None
    bare: bool = False


@dataclass(frozen=True, repr=False)
class Leave(_Shown):
    """Caller ``number`` is cancelled."""

    number: int


@dataclass(frozen=True, repr=False)
class Turn(_Shown):
    """The event loop does what is ready now; what that makes ready waits for its next turn."""

    loop: int = 0


@dataclass(frozen=True, repr=False)
class Spin(_Shown):
    """The event loop runs until it has nothing to do."""

    loop: int = 0


@dataclass(frozen=True, repr=False)
class Desert(_Shown):
    """The event loop is closed, with all callers on it."""

    loop: int = 0


@dataclass(frozen=True, repr=False)
class Tick(_Shown):
    """Time passes."""

    seconds: float = 1.0


@dataclass(frozen=True, repr=False)
class Step(_Shown):
    """The actor thread does what it does next, unless it is inside a call."""


@dataclass(frozen=True, repr=False)
class Watch(_Shown):
    """The watchdog looks."""


@dataclass(frozen=True, repr=False)
class Fail(_Shown):
    """The next calls raise, whatever they hold; ``raises`` chooses what."""

    calls: int = 1
    raises: int = 0


@dataclass(frozen=True, repr=False)
class Return(_Shown):
    """The next call returns something else than one result per item."""

    what: Wrong = "too few"


@dataclass(frozen=True, repr=False)
class Lose(_Shown):
    """The next call loses the backend, and so many of the builds after it fail."""

    failing_builds: int = 0


@dataclass(frozen=True, repr=False)
class Memory(_Shown):
    """From now on there is memory for calls of this cost; None: for all."""

    cost: int | None = None


@dataclass(frozen=True, repr=False)
class Stick(_Shown):
    """A thread that comes to ``point`` stays there until ``Back``; what is between happens meanwhile."""

    point: Point = "call"


@dataclass(frozen=True, repr=False)
class Back(_Shown):
    """Whoever is stuck goes on."""


@dataclass(frozen=True, repr=False)
class Crash(_Shown):
    """The next time that the actor thread tells a loop, it dies of it."""


@dataclass(frozen=True, repr=False)
class Close(_Shown):
    """Shutdown."""

    drain: bool = False


Event: TypeAlias = (
    Arrive
    | Leave
    | Turn
    | Spin
    | Desert
    | Tick
    | Step
    | Watch
    | Fail
    | Return
    | Lose
    | Memory
    | Stick
    | Back
    | Crash
    | Close
)


class Schedule(NamedTuple):
    setup: Setup
    events: Sequence[Event]

    def __str__(self) -> str:
        lines = "".join(f"        {event!r},\n" for event in self.events)
        return f"run(\n    {self.setup!r},\n    [\n{lines}    ],\n)"


# ---- sampled

#: Kinds of events and how often they come, of those that a schedule has at all.
_ALWAYS = {"arrive": 6, "step": 10, "spin": 3, "turn": 2}
_SOMETIMES = {
    "crowd": 2,
    "late": 2.5,
    "broken": 0.5,
    "plague": 0.3,
    "uneven": 0.3,
    "leave": 3,
    "tick": 3,
    "fail": 2,
    "return": 1,
    "lose": 1,
    "memory": 1,
    "stick": 3,
    "back": 3,
    "watch": 2,
    "crash": 0.5,
    "close": 0.5,
    "desert": 0.3,
}
_POINTS: tuple[Point, ...] = ("call", "call", "call", "tell", "record", "start", "stop")
_WRONGS: tuple[Wrong, ...] = ("too few", "too many", "none", "dict")


def sample(seed: int) -> Schedule:
    """A schedule at random: the same for the same seed.

    Each has some kinds of events and faults and not others, which finds more than having all of them always.
    """
    return _Sampler(random.Random(seed)).schedule()


class _Sampler:
    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.flip = chance.random
        self.arrived = 0
        self.keys = "ab" if self.flip() < 0.4 else "a"
        self.cap = chance.choice((None, 4, 8, 8, 16))
        self.faults = [fault for fault in Fault if self.flip() < 0.35]
        self.spoiled = chance.choice((0.05, 0.15, 0.4, 0.7))
        self.most_items = chance.choice((1, 2, 3, 6))
        self.impatient = chance.choice((0.0, 0.0, 0.3))
        self.bare = chance.choice((0.0, 0.0, 0.2))

    def schedule(self) -> Schedule:
        weights: dict[str, float] = {**_ALWAYS}
        weights |= {kind: weight for kind, weight in _SOMETIMES.items() if self.flip() < 0.4}
        length = self.chance.choice((6, 10, 16, 24, 40))
        kinds = self.chance.choices(list(weights), list(weights.values()), k=length)
        setup = self.setup()
        events: list[Event] = []
        for kind in kinds:
            happens = getattr(self, f"_{kind}")()
            events += happens if isinstance(happens, list) else [happens]
        return Schedule(setup, events)

    def setup(self) -> Setup:
        chance, cap = self.chance, self.cap
        return Setup(
            max_batch_cost=cap,
            max_batch_items=chance.choice((None, None, 1, 2, 3, 5)),
            buckets=() if cap is None or self.flip() < 0.7 else (cap // 4, cap // 2, cap),
            max_wait_s=chance.choice((0.0, 1.5, None)),
            max_pending_cost=chance.choice((None, None, 6, 12, 20)),
            isolate=self.flip() < 0.9,
            forward_timeout_s=chance.choice((None, 2.5, 2.5)),
            max_rebuilds=chance.choice((0, 1, 3, 3)),
            is_observed=self.flip() < 0.5,
        )

    def _arrive(self) -> Arrive:
        self.arrived += 1
        words = " ".join(self._word() for _ in range(self.chance.randint(1, self.most_items)))
        return Arrive(
            self.arrived,
            words,
            loop=self.chance.randrange(LOOPS),
            patience_s=self.chance.choice((0.5, 1.5, 3.5)) if self.flip() < self.impatient else None,
            bare=self.flip() < self.bare,
        )

    def _crowd(self) -> list[Event]:
        """Enough callers at once for them to share a batch."""
        return [self._arrive() for _ in range(self.chance.randint(2, 9))]

    def _late(self) -> list[Event]:
        """A call that may be too late, and is looked at."""
        return [Stick("call"), Step(), self._arrive(), self._tick(), Watch()]

    def _broken(self) -> list[Event]:
        """A backend that fails whatever it gets, batch after batch."""
        events: list[Event] = [Fail(60)]
        for _ in range(self.chance.randint(2, 4)):
            events += [self._arrive() for _ in range(self.chance.randint(2, 4))]
            events += [Step()] * 6
        return events

    def _plague(self) -> list[Event]:
        """More culprits in one batch than can be told apart in the calls that there are for it."""
        return self._arrivals(self.chance.choices(("a1", "a1!"), k=24))

    def _uneven(self) -> list[Event]:
        """Small items that fit beside large ones, one after the other, and one between that never does."""
        large = (self.cap or 10) - 1
        return self._arrivals([f"a{large}"] * 11 + ["a2"] + ["a1"] * 11)

    def _arrivals(self, items: Sequence[str]) -> list[Event]:
        events: list[Event] = []
        for each in items:
            self.arrived += 1
            events.append(Arrive(self.arrived, each, loop=self.chance.randrange(LOOPS)))
        return events

    def _word(self) -> str:
        most = self.cap or 10
        cost = self.chance.randint(1, most if self.flip() < 0.3 else max(1, most // 3))
        fault = self.chance.choice(self.faults) if self.faults and self.flip() < self.spoiled else Fault.NONE
        return f"{self.chance.choice(self.keys)}{cost}{fault.value}"

    def _leave(self) -> Leave:
        return Leave(self.chance.randint(max(1, self.arrived - 5), max(1, self.arrived)))

    def _turn(self) -> Turn:
        return Turn(self.chance.randrange(LOOPS))

    def _spin(self) -> Spin:
        return Spin(self.chance.randrange(LOOPS))

    def _desert(self) -> Desert:
        return Desert(self.chance.randrange(LOOPS))

    def _tick(self) -> Tick:
        return Tick(self.chance.choice((1.0, 2.0, 4.0, 64.0)))

    def _step(self) -> Step:
        return Step()

    def _watch(self) -> Watch:
        return Watch()

    def _fail(self) -> Fail:
        return Fail(self.chance.choice((1, 1, 1, 2, 3, 9, 60)), raises=self.chance.randrange(8))

    def _return(self) -> Return:
        return Return(self.chance.choice(_WRONGS))

    def _lose(self) -> Lose:
        return Lose(self.chance.choice((0, 0, 0, 1, 4)))

    def _memory(self) -> Memory:
        return Memory(self.chance.choice((None, 1, 2, 3, 5)))

    def _stick(self) -> Stick:
        return Stick(self.chance.choice(_POINTS))

    def _back(self) -> Back:
        return Back()

    def _crash(self) -> Crash:
        return Crash()

    def _close(self) -> Close:
        return Close(drain=self.flip() < 0.5)


# ---- enumerated


def enumerate_all(alphabet: Sequence[Sequence[Any]], length: int) -> Iterator[list[Event]]:
    """Every word of this many letters of ``alphabet``, each letter a few events.

    An ``Arrive`` gets the number of its place; a ``Leave`` is of the caller that came that many before it.
    """
    for letters in itertools.product(alphabet, repeat=length):
        events: list[Event] = []
        arrived = 0
        for event in itertools.chain.from_iterable(letters):
            if isinstance(event, Arrive):
                arrived += 1
                events.append(Arrive(arrived, event.items, event.loop, event.patience_s, event.bare))
            elif isinstance(event, Leave):
                events.append(Leave(arrived + 1 - event.number))
            else:
                events.append(event)
        yield events
