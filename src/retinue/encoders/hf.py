"""The vision half of a Hugging Face model, as ``retinue split`` writes it, behind the batcher.

Thread rules
    The model belongs to the actor thread. ``preprocess``, on pool threads, uses the image processor, which
    keeps no state between calls, and what ``build`` made before the first of them: numbers and a table.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import PIL.Image
import torch
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor, AutoModel

from retinue.encoder.backend import Preprocessed, VisionEncoderBackend
from retinue.encoders.families import Family, Size, View, family_of
from retinue.media import Image

__all__ = ["SPANS_FILE", "HFVisionEncoder", "Item"]

#: In an encoder's folder: the pieces of its spans, by name, as rows of its table of embeddings.
SPANS_FILE = "spans.json"


@dataclass(frozen=True, eq=False)
class Item:
    """One image, ready for the tower.

    ``tiles``: (tiles, channels, height, width). ``size``: (height, width) of the image. ``rows``: how many
    the tower makes of it. ``span``: (cost,), which of [*table, *rows] each row of the artifact is.
    """

    tiles: Tensor
    size: Size
    rows: int
    span: Tensor


class HFVisionEncoder(VisionEncoderBackend[bytes | Image | PIL.Image.Image, Item, Tensor]):
    """Serves OUT/encoder of ``retinue split``: an artifact is what the whole model has in an image's place.

    It is ``(rows, hidden)`` on the CPU: the tower's rows in the family's order, with the embeddings
    of the tokens that the family puts around and between them. ``cost`` is its number of rows. ``key`` is the
    shape of a tile: where all tiles have one shape, images of any sizes share a batch.

    ``device``: None is CUDA where there is one, else the CPU. ``dtype``: None is the checkpoint's on CUDA and
    float32 on the CPU, which is slow at the narrow ones.
    """

    #: Limits are read before the model is, so this is one number for all families: the least power of two
    #: that holds the largest image of each with its published settings (LLaVA-OneVision's has 8,721 rows).
    max_batch_cost = 16_384

    def __init__(self, *, device: str | None = None, dtype: torch.dtype | None = None) -> None:
        self._device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._dtype: torch.dtype | str = dtype or (
            "auto" if self._device.startswith("cuda") else torch.float32
        )
        self._loaded: _Loaded | None = None

    def build(self, model_id: str) -> None:
        """Load the folder ``model_id``; ``ValueError``: ``split`` did not write it."""
        spans = Path(model_id) / SPANS_FILE
        if not spans.is_file():
            raise ValueError(f"{model_id!r} is no encoder that `retinue split` wrote: it has no {SPANS_FILE}")
        family = family_of(AutoConfig.from_pretrained(model_id))
        model: Any = AutoModel.from_pretrained(model_id, dtype=self._dtype)
        model.train(False).requires_grad_(False).to(self._device)
        family.prepare(model)
        loaded = _Loaded(
            family, model, AutoImageProcessor.from_pretrained(model_id), json.loads(spans.read_text())
        )
        with torch.inference_mode():
            loaded.measure()
        self._loaded = loaded

    def preprocess(self, raw: bytes | Image | PIL.Image.Image) -> Preprocessed[Item]:
        """Decode a file, unless it is a picture already, and put it through the family's image processor."""
        if isinstance(raw, PIL.Image.Image):
            picture = raw.convert("RGB")
        else:
            picture = (raw if isinstance(raw, Image) else Image(raw)).decode()
        item = self._running().item(picture)
        return Preprocessed(item, cost=len(item.span), key=tuple(item.tiles.shape[1:]))

    @torch.inference_mode()
    def forward_batch(self, items: Sequence[Item], target_bucket: int | None = None) -> list[Tensor]:
        """The artifact of each item, (cost, hidden), in storage of its own."""
        return self._running().encode(items)

    def close(self) -> None:
        """Let the weights go."""
        self._loaded = None

    def _running(self) -> _Loaded:
        assert self._loaded is not None, "build comes first"
        return self._loaded


class _Loaded:
    """What ``build`` made, published as one value."""

    def __init__(self, family: Family, model: Any, processor: Any, pieces: dict[str, list[int]]) -> None:
        self._family = family
        self._model = model
        self._processor = processor
        self._pieces = {"": [], **pieces}
        self._table: Tensor = model.get_input_embeddings().weight  # (table, hidden)
        self._table_rows = len(self._table)
        self._tile_rows = 0

    def measure(self) -> None:
        """Find out how many rows a tile has."""
        view = self._see(PIL.Image.new("RGB", (64, 64), "white"))
        tiles = View(self._on_device(view.tiles), view.size, view.grid)
        self._tile_rows = self._family.tile_rows(self._model, tiles)

    def item(self, picture: PIL.Image.Image) -> Item:
        view = self._see(picture)
        runs = self._family.runs(view, self._tile_rows)
        pieces = self._family.pieces(view)
        span, begin = list(self._pieces[pieces[0]]), self._table_rows
        for run, piece in zip(runs, pieces[1:], strict=True):
            span += range(begin, begin + run)
            span += self._pieces[piece]
            begin += run
        return Item(view.tiles, view.size, sum(runs), torch.tensor(span))

    def encode(self, items: Sequence[Item]) -> list[Tensor]:
        tiles = self._on_device(torch.cat([item.tiles for item in items]))
        rows = self._family.encode(self._model, tiles, [item.size for item in items])  # (rows of all, hidden)
        of_each = rows.split([item.rows for item in items])
        return [
            torch.cat([self._table, own])[item.span.to(own.device)].cpu()  # (cost, hidden), and finished
            for item, own in zip(items, of_each, strict=True)
        ]

    def _see(self, picture: PIL.Image.Image) -> View:
        features = self._processor(images=[picture], return_tensors="pt", **self._family.options)
        return self._family.see(features, (picture.height, picture.width))

    def _on_device(self, tiles: Tensor) -> Tensor:
        return tiles.to(self._table.device, self._table.dtype)
