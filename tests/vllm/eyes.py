"""The demo's encoder, which writes down when it is built and closed; what the servers of these tests load."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from retinue.demo.encoder import DigitsEncoder
from retinue.errors import BackendLost


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

    hidden_size = 7

    def forward_batch(self, items: Sequence[Tensor], target_bucket: int | None = None) -> list[Tensor]:
        return [torch.zeros(3, 7) for _ in items]


class Doomed(Eyes):
    """It is lost with the first picture that is not the one it is tried out with."""

    def __init__(self) -> None:
        super().__init__()
        self._tried_out = False

    def forward_batch(self, items: Sequence[Tensor], target_bucket: int | None = None) -> list[Tensor]:
        if self._tried_out:
            raise BackendLost("the device is gone")
        self._tried_out = True
        return super().forward_batch(items)


def _write(what: str) -> None:
    with Path(os.environ["EYES_DIARY"]).open("a") as diary:
        print(what, file=diary)
