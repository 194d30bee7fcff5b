"""Guarantees 1 to 11 of DESIGN.md hold whatever happens in whatever order: 20,000 schedules of faults.

``python -m tests.faults.soak`` runs new ones for as long as one likes.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from .figures import Report
from .schedule import (
    Arrive,
    Back,
    Close,
    Event,
    Fail,
    Leave,
    Lose,
    Schedule,
    Setup,
    Spin,
    Step,
    Stick,
    enumerate_all,
    sample,
)

pytestmark = pytest.mark.timeout(240)  # for some seconds of work, where the cores are taken

SAMPLED = 14_000
AT_ONCE = 1_000


def check(named: Iterable[tuple[str, Schedule]]) -> Report:
    report = Report()
    report.run(named)
    if report.failures:
        pytest.fail("\n\n".join(report.failures), pytrace=False)
    return report


@pytest.mark.parametrize("first", range(0, SAMPLED, AT_ONCE))
def test_the_guarantees_hold_in_sampled_schedules(first: int) -> None:
    report = check((f"sample({seed})", sample(seed)) for seed in range(first, first + AT_ONCE))
    figures = report.figures
    assert figures["schedules"] == AT_ONCE
    for ending in ("ok", "failed", "out_of_memory", "lost"):
        assert figures[f"calls {ending}"] > 100, figures
    for outcome in ("ok", "failed", "unavailable", "deadline", "left"):
        assert figures[f"requests {outcome}"] > 50, figures


#: Each is one thing that may happen; see ``enumerate_all`` for the numbers.
ALPHABET: list[list[Event]] = [
    [Arrive(0, "a1 a2")],
    [Arrive(0, "a2! a1", loop=1)],
    [Leave(1)],
    [Stick(), Step()],
    [Step(), Spin(0)],
    [Back()],
    [Fail()],
    [Lose()],
    [Close()],
]


@pytest.mark.parametrize("length", [2, 3, 4])
def test_the_guarantees_hold_in_all_short_schedules(length: int) -> None:
    setup = Setup(max_batch_cost=4, max_rebuilds=1, is_observed=True)
    named = ((str(events), Schedule(setup, events)) for events in enumerate_all(ALPHABET, length))
    assert check(named).figures["schedules"] == len(ALPHABET) ** length
