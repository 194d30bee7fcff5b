"""The demo's encoder, which writes down when it is built and closed; what the servers of these tests load."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from retinue.demo.encoder import DigitsEncoder


class Eyes(DigitsEncoder):
    """``EYES_DIARY`` is the file that it writes to."""

    def build(self, model_id: str) -> None:
        """Load the demo's encoder, whatever model the server has."""
        super().build("demo")
        _write("built")

    def close(self) -> None:
        _write("closed")


class TooWide(Eyes):
    """Its rows fit no model that we have."""

    def forward_batch(self, items: Sequence[Tensor], target_bucket: int | None = None) -> list[Tensor]:
        return [torch.zeros(3, 7) for _ in items]


def _write(what: str) -> None:
    with Path(os.environ["EYES_DIARY"]).open("a") as diary:
        print(what, file=diary)
