"""A slice of the hygiene: ``python -m tests.chaos.hygiene`` is the whole."""

from __future__ import annotations

import pytest

from .hygiene import run

OUTCOMES = {
    "ok",
    "CancelledError",
    "DeadlineExceeded",
    "EncoderFailed",
    "EncoderUnavailable",
    "InvalidInput",
    "Overloaded",
    "TimeoutError",
}


@pytest.mark.timeout(120)
def test_a_hundred_thousand_requests_of_all_outcomes_leave_nothing_behind() -> None:
    findings = run(100_000, seed="1")
    assert findings.retained() == [], findings
    assert set(findings.outcomes) == OUTCOMES, findings
    assert findings.outcomes["ok"] > 50_000, findings
