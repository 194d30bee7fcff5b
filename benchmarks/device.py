"""A simulated accelerator: a call takes 2 ms, and 0.2 ms more for each of at most 64 items, by sleeping."""

from __future__ import annotations

import time
from typing import TypeVar

CALL_S = 0.002
ITEM_S = 0.0002
CAP = 64  # items of one call
CAPACITY = CAP / (CALL_S + CAP * ITEM_S)  # items per second, in full calls

T = TypeVar("T")


class Device:
    """Returns what it gets when its time is over. A sleep lasts some 60 us too long, whoever calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.items = 0

    def __call__(self, items: list[T]) -> list[T]:
        assert len(items) <= CAP, len(items)
        self.calls += 1
        self.items += len(items)
        time.sleep(CALL_S + ITEM_S * len(items))
        return items


class NoDevice(Device):
    """Returns what it gets at once."""

    def __call__(self, items: list[T]) -> list[T]:
        self.calls += 1
        self.items += len(items)
        return items
