"""The demo's vision encoder: convolutions and a small transformer, for pictures of any size.

A picture is divided into *cells* of 8x8 px, and each cell becomes one row in front of the language model.
Batches of mixed shapes are packed: the cells of all pictures lie in one long tensor, and only attention sees
which rows belong together. So the cost of a batch is the number of its rows, whatever the shapes of its
pictures, and a picture's rows are the same alone and in company.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["DigitVision", "VisionConfig"]


@dataclass(frozen=True)
class VisionConfig:
    """Sizes of the encoder; ``cell`` in pixels."""

    cell: int = 8
    max_cells: int = 25
    width: int = 96
    layers: int = 3
    heads: int = 4
    hidden_size: int = 128

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


class Scale(nn.Module):
    """A convolution to half the resolution, and a residual one after it."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(channels_in, channels, kernel_size=3, stride=2, padding=1)
        self.norm = nn.LayerNorm(channels)
        self.more = nn.Conv2d(channels, channels, kernel_size=3, padding=1)

    def forward(self, x: Tensor, inside: Tensor) -> Tensor:
        """(pictures, channels_in, 2 * height, 2 * width) to (pictures, channels, height, width).

        ``inside``, (pictures, 1, height, width), is 1 in a picture and 0 beyond its edges, where all stays 0.
        """
        x = self.norm(self.down(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)  # over the channels of a pixel
        x = functional.gelu(x) * inside
        mixed: Tensor = (x + functional.gelu(self.more(x))) * inside
        return mixed


class Stem(nn.Module):
    """Convolutions at three scales, the last of which has one pixel for each cell.

    Pictures are convolved together with those of about their shape: a canvas for all would be as wide as the
    widest and as high as the highest.
    """

    #: Pictures are of one shape if their grids are equal when rounded up to so many cells.
    shape_class = 5

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scales = nn.ModuleList(
            [Scale(3, width // 4), Scale(width // 4, width // 2), Scale(width // 2, width)]
        )

    def forward(self, pictures: Sequence[Tensor]) -> list[Tensor]:
        """Pictures, each (8 * rows, 8 * columns, 3) uint8, to their cells, each (rows, columns, width)."""
        classes: dict[tuple[int, int], list[int]] = {}
        grids = [(picture.shape[0] // 8, picture.shape[1] // 8) for picture in pictures]
        for index, (rows, columns) in enumerate(grids):
            shape_class = -(-rows // self.shape_class), -(-columns // self.shape_class)
            classes.setdefault(shape_class, []).append(index)
        cells: list[Tensor] = [torch.empty(0)] * len(pictures)
        for members in classes.values():
            on_canvas = self._convolve([pictures[index] for index in members])
            for index, of_one in zip(members, on_canvas, strict=True):
                rows, columns = grids[index]
                cells[index] = of_one[:rows, :columns]
        return cells

    def _convolve(self, pictures: Sequence[Tensor]) -> Tensor:
        """Pictures of similar shapes to (pictures, most rows, most columns, width)."""
        heights = torch.tensor([picture.shape[0] for picture in pictures])
        widths = torch.tensor([picture.shape[1] for picture in pictures])
        height, width = int(heights.max()), int(widths.max())
        canvas = torch.full((len(pictures), height, width, 3), 127.5)
        for place, picture in zip(canvas, pictures, strict=True):
            place[: picture.shape[0], : picture.shape[1]] = picture
        x = canvas.to(next(self.parameters()).dtype).permute(0, 3, 1, 2) / 127.5 - 1  # 0 beyond the edges
        for scale, step in zip(self.scales, (2, 4, 8), strict=True):
            in_height = torch.arange(0, height, step) < heights[:, None]  # (pictures, height / step)
            in_width = torch.arange(0, width, step) < widths[:, None]
            x = scale(x, (in_height[:, None, :, None] & in_width[:, None, None, :]).to(x.dtype))
        return x.permute(0, 2, 3, 1)


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
        self.stem = Stem(width)
        self.row = nn.Parameter(torch.randn(config.max_cells, width) * 0.02)
        self.column = nn.Parameter(torch.randn(config.max_cells, width) * 0.02)
        self.bounds = nn.Parameter(torch.randn(2, width) * 0.02)  # the rows that begin and end every picture
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(width)
        self.projector = nn.Sequential(
            nn.Linear(width, config.hidden_size),
            nn.GELU(),
            nn.Linear(config.hidden_size, config.hidden_size),
        )
        # Tell the language model where a picture begins and ends; learnt together with it.
        self.markers = nn.Parameter(torch.zeros(2, config.hidden_size))

    def forward(self, pictures: Sequence[Tensor]) -> list[Tensor]:
        """Pictures, each (8 * rows, 8 * columns, 3) uint8, to (rows * columns + 2, hidden_size) of each."""
        grids = self.stem(pictures)
        cells = [
            (grid + self.row[: len(grid), None] + self.column[: grid.shape[1]]).flatten(
                0, 1
            )  # (cells, width)
            for grid in grids
        ]
        packing = Packing([len(of_one) for of_one in cells])
        rows = torch.cat([*cells, self.bounds])[packing.source]  # (rows of all, width)
        for block in self.blocks:
            rows = block(rows, packing)
        projected = self.projector(self.norm(rows)).split([len(of_one) + 2 for of_one in cells])
        return [self.mark(of_one) for of_one in projected]

    def mark(self, rows: Tensor) -> Tensor:
        """The rows of one picture, (cells + 2, hidden_size), with its begin and its end marked."""
        begin, end = self.markers
        return torch.cat([rows[:1] + begin, rows[1:-1], rows[-1:] + end])

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
