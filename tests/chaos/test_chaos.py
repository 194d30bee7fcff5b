"""A slice of the chaos: ``python -m tests.chaos.soak`` is the whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from .load import STAGES
from .session import Session

SEED = "1"


@pytest.mark.timeout(300)  # a minute, where the cores are its own
async def test_whoever_stays_is_answered_honestly_whatever_goes_wrong(tmp_path: Path) -> None:
    async with Session(SEED, tmp_path) as session:
        await session.round(6)
        await session.round(26, dies=True, breaks=True, orders=["lost", "stuck"])
        report = await session.end()
    assert report.problems == [], str(report)
    for warm, end in report.resident_bytes.values():
        assert end - warm < 24 * 2**20, str(report)
    # The chaos was one, or the above says little.
    assert report.answers["200"] >= 200, str(report)
    assert {"400", "429", "500", "502"} <= set(report.answers), str(report)
    assert set(report.left) == set(STAGES), str(report)
    assert report.failed_calls >= 20, str(report)
    assert (report.deaths, report.losses, report.stuck_calls) == (1, 2, 2), str(report)
