"""The demo's vision encoder: a small transformer over the cells of pictures of any size.

A picture is cut into *cells* of 8x8 px, and each cell becomes one row in front of the language model.
Batches are packed, not padded: the cells of all pictures lie in one long tensor, and only attention
sees which rows belong together. So the cost of a batch is the number of its rows, whatever the shapes
of its pictures, and a picture's rows are the same alone and in company.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Cells", "DigitVision", "VisionConfig", "cut"]


@dataclass(frozen=True)
class VisionConfig:
    """Sizes of the encoder; ``cell`` and ``margin`` in pixels."""

    cell: int = 8
    margin: int = 4
    max_cells: int = 36
    width: int = 96
    layers: int = 3
    heads: int = 4
    hidden_size: int = 128

    @property
    def window(self) -> int:
        """The side, in pixels, of what is seen of a cell: itself and a margin of its neighbours."""
        return self.cell + 2 * self.margin

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows of cells for a picture of ``width`` x ``height`` px.

        The largest grid of at most ``max_cells`` that does not enlarge the picture and keeps its aspect ratio
        as nearly as whole cells allow. Each axis has at least one cell.
        """
        scale = min(1.0, math.sqrt(self.max_cells * self.cell**2 / (width * height)))
        columns = max(1, round(width * scale / self.cell))
        rows = max(1, round(height * scale / self.cell))
        while columns * rows > self.max_cells:
            if columns >= rows:
                columns -= 1
            else:
                rows -= 1
        return columns, rows


class Cells(NamedTuple):
    """A picture cut into its cells, in reading order."""

    windows: Tensor  # (cells, 3, window, window), uint8
    places: Tensor  # (cells, 2), int64: the row and the column of each cell


def cut(pixels: Tensor, config: VisionConfig) -> Cells:
    """Cut a picture, (height, width, 3) uint8 with sides that are multiples of a cell, into its cells."""
    rows, columns = pixels.shape[0] // config.cell, pixels.shape[1] // config.cell
    around = (config.margin,) * 4
    framed = functional.pad(pixels.permute(2, 0, 1), around, value=128)  # beyond the edge all is grey
    windows = framed.unfold(1, config.window, config.cell).unfold(2, config.window, config.cell)
    windows = windows.permute(1, 2, 0, 3, 4).reshape(rows * columns, 3, config.window, config.window)
    places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
    return Cells(windows, places)


class Packing:
    """Where the rows of each picture lie among the packed rows of a batch, begin and end rows included."""

    def __init__(self, cells: Sequence[int]) -> None:
        lengths = torch.tensor(cells) + 2  # (images,)
        images, longest, rows = len(cells), int(lengths.max()), int(lengths.sum())
        image = torch.repeat_interleave(torch.arange(images), lengths)  # (rows,)
        position = torch.arange(rows) - (lengths.cumsum(0) - lengths)[image]  # (rows,)
        is_begin, is_end = position == 0, position == lengths[image] - 1
        source = torch.arange(rows) - 2 * image - 1
        source[is_begin], source[is_end] = rows - 2 * images, rows - 2 * images + 1
        #: Which of [*cells, begin, end] each row is: (rows,)
        self.source = source
        self._shape = images, longest
        self._slots = image * longest + position  # (rows,): a row's place among the padded ones
        self._mask = (torch.arange(longest) < lengths[:, None])[:, None, None, :]  # (images, 1, 1, longest)

    def attend(self, qkv: Tensor, heads: int) -> Tensor:
        """Attention within each picture: (rows, 3 * width) to (rows, width)."""
        images, longest = self._shape
        padded = qkv.new_zeros(images * longest, qkv.shape[1]).index_copy(0, self._slots, qkv)
        q, k, v = padded.view(images, longest, 3, heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=self._mask)
        return mixed.transpose(1, 2).reshape(images * longest, -1)[self._slots]


class Stem(nn.Module):
    """Two strided convolutions and a projection: what is in a window, as one row."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 24, kernel_size=3, stride=2, padding=1)
        self.norm1 = nn.LayerNorm(24)
        self.conv2 = nn.Conv2d(24, 48, kernel_size=3, stride=2, padding=1)
        self.norm2 = nn.LayerNorm(48)
        self.project = nn.Linear(48 * (config.window // 4) ** 2, config.width)

    def forward(self, windows: Tensor) -> Tensor:
        """(cells, 3, window, window) uint8 to (cells, width)."""
        pixels = windows.to(self.project.weight.dtype) / 127.5 - 1
        x = self.conv1(pixels.contiguous(memory_format=torch.channels_last)).permute(0, 2, 3, 1)
        x = functional.gelu(self.norm1(x))  # (cells, window / 2, window / 2, 24)
        x = self.conv2(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        x = functional.gelu(self.norm2(x))  # (cells, window / 4, window / 4, 48)
        projected: Tensor = self.project(x.flatten(1))
        return projected


class Block(nn.Module):
    """One transformer layer, its norms before what they feed."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, rows: Tensor, packing: Packing) -> Tensor:
        """(rows, width) to the same shape."""
        rows = rows + self.out(packing.attend(self.qkv(self.norm1(rows)), self.heads))
        mixed: Tensor = rows + self.mlp(self.norm2(rows))
        return mixed


class DigitVision(nn.Module):
    """Pictures to rows that a language model reads in place of token embeddings."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.stem = Stem(config)
        self.row = nn.Embedding(config.max_cells, width)
        self.column = nn.Embedding(config.max_cells, width)
        self.bounds = nn.Parameter(torch.randn(2, width))  # the rows that begin and end every picture
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(width)
        self.projector = nn.Sequential(
            nn.Linear(width, config.hidden_size),
            nn.GELU(),
            nn.Linear(config.hidden_size, config.hidden_size),
        )

    def forward(self, pictures: Sequence[Cells]) -> Tensor:
        """The rows of all pictures, one after the other: (sum of cells + 2 of each, hidden_size)."""
        packing = Packing([len(picture.places) for picture in pictures])
        places = torch.cat([picture.places for picture in pictures])
        cells = self.stem(torch.cat([picture.windows for picture in pictures]))  # (cells, width)
        cells = cells + self.row(places[:, 0]) + self.column(places[:, 1])
        rows = torch.cat([cells, self.bounds])[packing.source]  # (rows, width)
        for block in self.blocks:
            rows = block(rows, packing)
        projected: Tensor = self.projector(self.norm(rows))
        return projected

    def save(self, folder: Path) -> None:
        """Write ``config.json`` and ``model.safetensors``."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(asdict(self.config), indent=2) + "\n")
        save_file(
            {name: value.contiguous() for name, value in self.state_dict().items()},
            folder / "model.safetensors",
        )

    @classmethod
    def load(cls, folder: Path) -> DigitVision:
        """Read what ``save`` wrote, in float32 and ready to run."""
        vision = cls(VisionConfig(**json.loads((folder / "config.json").read_text())))
        vision.load_state_dict(load_file(folder / "model.safetensors"))
        return vision.float().eval()
