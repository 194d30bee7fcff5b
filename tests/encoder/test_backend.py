"""The contract that an encoder author writes to."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from retinue import Preprocessed, VisionEncoderBackend


class Least(VisionEncoderBackend[Any, Any, Any]):
    def build(self, model_id: str) -> None:
        pass

    def forward_batch(self, items: list[Any], target_bucket: int | None = None) -> Sequence[Any]:
        return items


def test_a_backend_needs_build_and_forward_batch_and_nothing_else() -> None:
    assert VisionEncoderBackend.__abstractmethods__ == {"build", "forward_batch"}
    backend = Least()
    assert (backend.max_batch_cost, backend.max_batch_items) == (None, None)
    assert (backend.buckets, backend.preprocess_concurrency) == ((), None)
    assert backend.preprocess("raw") == Preprocessed("raw", cost=1, key=None)
    backend.close()


def test_an_item_costs_one_and_may_share_a_batch_with_any_unless_its_author_says_otherwise() -> None:
    assert Preprocessed("item") == Preprocessed(item="item", cost=1, key=None)


def test_preprocessed_does_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Preprocessed("item").cost = 2  # type: ignore[misc]  # the case
