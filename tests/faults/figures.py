"""Runs many schedules, counts what happened, and keeps those that fail, made short."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from .driver import quiet, run
from .schedule import Schedule
from .shrink import shrink

#: Failures that are worth looking at, at a time.
_MOST_FAILURES = 5


@dataclass
class Report:
    """What came of some schedules."""

    figures: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def run(self, named: Iterable[tuple[str, Schedule]]) -> None:
        """Run schedules, each with a name to be found by, until too many have failed."""
        with quiet():
            for name, schedule in named:
                self.figures["schedules"] += 1
                error = violation(schedule, self.figures)
                if error is not None:
                    self.figures["failures"] += 1
                    self.failures.append(_told(name, schedule, error))
                    if len(self.failures) >= _MOST_FAILURES:
                        break


def violation(schedule: Schedule, figures: Counter[str] | None = None) -> BaseException | None:
    """What the schedule breaks, if anything."""
    try:
        run(*schedule, figures)
    except BaseException as error:
        return error.with_traceback(None)
    return None


def _told(name: str, schedule: Schedule, error: BaseException) -> str:
    """The failure and the shortest schedule that fails in the same manner, for a regression test."""
    kind = _kind(error)
    short = shrink(schedule, lambda candidate: _kind(violation(candidate)) == kind)
    return f"{name} fails: {error!r}\nand so does, with {violation(short)!r}:\n{short}"


def _kind(error: BaseException | None) -> str:
    """Its type and text up to what differs from one schedule to another."""
    text = "".join("0" if letter.isdigit() else letter for letter in str(error))
    return f"{type(error).__name__} {text[:24]}"
