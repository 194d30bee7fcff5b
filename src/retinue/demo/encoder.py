"""The demo's backend: pictures of digits, in any format and size, to rows for the demo's language model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import PIL.Image
import torch
from torch import Tensor

from retinue.demo.vision import DigitVision, VisionConfig
from retinue.encoder.backend import Preprocessed, VisionEncoderBackend
from retinue.errors import InvalidInput
from retinue.media import Image

__all__ = ["CHECKPOINT", "DigitsEncoder"]

#: The model that is shipped: a text model with its tokenizer and, in ``vision/``, the encoder's weights.
CHECKPOINT = Path(__file__).parent / "checkpoint"

#: A picture longer and narrower than this would be distorted beyond reading.
MAX_ASPECT = 16


class DigitsEncoder(VisionEncoderBackend[bytes | Image, Tensor, Tensor]):
    """One row for each 8x8 px cell and one at either end; ``cost`` counts them.

    Its batches are packed: pictures of any sizes share one, without padding, so there is no ``key``.
    """

    max_batch_cost = 1024
    hidden_size = 128

    def __init__(self) -> None:
        self._config = VisionConfig()
        self._vision: DigitVision | None = None

    def build(self, model_id: str) -> None:
        """Load the weights from the folder ``model_id``, or those that are shipped for "demo"."""
        folder = CHECKPOINT if model_id == "demo" else Path(model_id)
        self._vision = DigitVision.load(folder / "vision")
        self._config = self._vision.config

    def preprocess(self, raw: bytes | Image) -> Preprocessed[Tensor]:
        """Decode a file, shrink it to at most ``max_cells`` cells."""
        image = raw if isinstance(raw, Image) else Image(raw)
        width, height = image.size
        if max(width, height) > MAX_ASPECT * min(width, height):
            raise InvalidInput(
                f"{width}x{height} pixels: one side is more than {MAX_ASPECT} times as long as the other"
            )
        columns, rows = self._config.grid(width, height)
        size = columns * self._config.cell, rows * self._config.cell
        picture = image.decode(max_side=4 * max(size))  # enough for the filter to work on
        fitted = picture.resize(size, PIL.Image.Resampling.BICUBIC)
        pixels = torch.from_numpy(np.array(fitted))  # (height, width, 3) uint8
        return Preprocessed(pixels, cost=columns * rows + 2)

    @torch.inference_mode()
    def forward_batch(self, items: Sequence[Tensor], target_bucket: int | None = None) -> list[Tensor]:
        """The rows of each picture, (cells + 2, 128) float32, in storage of their own."""
        assert self._vision is not None, "build comes first"
        return [rows.clone() for rows in self._vision(items)]

    def close(self) -> None:
        """Let the weights go."""
        self._vision = None
