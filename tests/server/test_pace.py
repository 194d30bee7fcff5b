"""How long what waits will take, by the pace of what was served before."""

from __future__ import annotations

import pytest

from retinue.server.pace import Pace


def test_a_pace_is_unknown_until_a_call_has_ended_and_then_forgets_slowly() -> None:
    pace = Pace()
    assert pace.seconds_for(1000) == 1.0
    pace.note(10, 1.0)
    assert pace.seconds_for(20) == pytest.approx(2.0)
    for _ in range(100):
        pace.note(10, 2.0)
    assert pace.seconds_for(20) == pytest.approx(4.0, rel=1e-3)
