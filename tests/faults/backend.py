"""A backend that fails as a schedule says."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any

from retinue.batching.outcome import Refused
from retinue.errors import BackendLost, EncoderFailed, EncoderUnavailable

from .model import Call, Ending
from .schedule import Fault, Wrong


class Token:
    """An item as the batcher sees it."""

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number


class Answer(Token):
    """The result for the item of this number."""


class BadPixel(ValueError):
    """Unlike its base, a weak reference can follow it."""


class OutOfMemoryError(RuntimeError):
    """Has the name that torch's has."""


class Odd(BaseException):
    """Neither an ``Exception`` nor one of the interpreter's."""


_RAISED: tuple[Callable[[], BaseException], ...] = (
    BadPixel,
    lambda: RuntimeError("no such kernel"),
    StopIteration,
    SystemExit,
    KeyboardInterrupt,
    asyncio.CancelledError,
    lambda: EncoderUnavailable("not yours"),
    Odd,
)
_EXHAUSTED: tuple[Callable[[], BaseException], ...] = (
    MemoryError,
    lambda: OutOfMemoryError("tried to allocate"),
    lambda: RuntimeError("CUDA error: out of memory"),
)


class FaultyBackend:
    """Decides how calls and builds end."""

    def __init__(self) -> None:
        self._raises: list[Callable[[], BaseException]] = []  # by the next calls
        self._returns: Wrong | None = None
        self._is_to_be_lost = False
        self._failing_builds = 0
        self._memory: int | None = None
        self.made: list[weakref.ref[Any]] = []  # results and errors

    def fail(self, calls: int, raises: int) -> None:
        self._raises = [_RAISED[raises % len(_RAISED)]] * calls

    def return_instead(self, what: Wrong) -> None:
        self._returns = what

    def lose(self, failing_builds: int) -> None:
        self._is_to_be_lost, self._failing_builds = True, failing_builds

    def have_memory(self, cost: int | None) -> None:
        self._memory = cost

    def recover(self) -> None:
        """Fail no more, except for what the items do."""
        self._raises, self._returns, self._memory = [], None, None
        self._is_to_be_lost, self._failing_builds = False, 0

    def builds(self) -> bool:
        """Whether the next build succeeds."""
        is_well = self._failing_builds == 0
        self._failing_builds -= not is_well
        return is_well

    def ending(self, call: Call) -> tuple[Ending, BaseException | None, bool]:
        """How ``call`` ends, what it raises, and whether that is no fault of its items."""
        ending, error, is_transient = self._ending(call)
        if error is not None:
            error.held = frozenset(item.number for item in call.items)  # type: ignore[attr-defined]
            if type(error).__weakrefoffset__:
                self.made.append(weakref.ref(error))
        return ending, error, is_transient

    def _ending(self, call: Call) -> tuple[Ending, BaseException | None, bool]:
        faults = {item.fault for item in call.items}
        if self._is_to_be_lost or Fault.LETHAL in faults:
            is_transient, self._is_to_be_lost = self._is_to_be_lost, False
            return "lost", BackendLost("fell off the bus"), is_transient
        if Fault.HUGE in faults or (self._memory is not None and call.cost > self._memory):
            return "out_of_memory", _EXHAUSTED[call.cost % len(_EXHAUSTED)](), Fault.HUGE not in faults
        if self._raises:
            return "failed", self._raises.pop()(), True
        if Fault.POISON in faults:
            return "failed", BadPixel("poison"), False
        if self._returns is not None:
            return "failed", None, True
        return "ok", None, False

    def results(self, call: Call) -> Any:
        """What ``call`` returns, if it raises nothing."""
        results: list[Any] = []
        for item in call.items:
            answer = Answer(item.number)
            self.made.append(weakref.ref(answer))
            is_refused = item.fault is Fault.REFUSED
            results.append(Refused(EncoderFailed("not finite")) if is_refused else answer)
        returns, self._returns = self._returns, None
        if returns is None:
            return results
        wrong: dict[Wrong, Any] = {
            "too few": results[1:],
            "too many": [*results, None],
            "none": None,
            "dict": dict(enumerate(results)),
        }
        return wrong[returns]
