from __future__ import annotations

import logging

import pytest


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No log record is made, which would keep what it reports."""
    monkeypatch.setattr(logging.getLogger("retinue"), "disabled", True)
