"""Schedules find faults: here the faults are in what stands between the batcher and its driver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from .driver import Driver, quiet, run
from .figures import Report
from .loops import SimulatedLoop
from .schedule import sample

#: Schedules among which each fault must show.
FEW = 300


def skip_first(call: Callable[..., Any]) -> Callable[..., Any]:
    """Forget the first of every two calls."""
    calls = 0

    def skipping(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return call(*args, **options) if calls % 2 == 0 else None

    return skipping


def swapped(fn: Callable[..., Any]) -> Callable[..., Any]:
    def swapping(*args: Any, **options: Any) -> Any:
        results = fn(*args, **options)
        return results[::-1] if isinstance(results, list) else results

    return swapping


def keeping(call: Callable[..., Any]) -> Callable[..., Any]:
    kept: list[Any] = []

    def keeps(self: Any, items: Any, *args: Any, **options: Any) -> Any:
        kept.extend(items)
        return call(self, items, *args, **options)

    return keeps


def run_few() -> None:
    for seed in range(FEW):
        run(*sample(seed))


FAULTS: list[tuple[type[Any], str, Callable[[Any], Any], str]] = [
    (Driver, "fn", swapped, "got"),
    (Driver, "fn", keeping, "still referenced"),
    (Driver, "put", skip_first, "asleep"),
    (Driver, "on_stop", skip_first, "on_start again|on_stop was not called"),
    (Driver, "on_start", skip_first, "before on_start"),
    (Driver, "respawn", skip_first, "did not end|waits for ever|says so"),
    (Driver, "release_memory", skip_first, "releases of memory"),
    (Driver, "on_request", skip_first, "Counter"),
    (SimulatedLoop, "call_soon_threadsafe", skip_first, "nobody told it"),
]


@pytest.mark.parametrize(("owner", "name", "fault", "text"), FAULTS)
def test_a_fault_shows_within_a_few_schedules(
    monkeypatch: pytest.MonkeyPatch, owner: type[Any], name: str, fault: Callable[[Any], Any], text: str
) -> None:
    monkeypatch.setattr(owner, name, fault(getattr(owner, name)))
    with quiet(), pytest.raises(AssertionError, match=text):
        run_few()


def test_the_same_schedule_goes_the_same_way() -> None:
    reports = []
    for _ in range(2):
        report = Report()
        report.run(("", sample(seed)) for seed in range(50))
        reports.append(report.figures)
    assert reports[0] == reports[1]
