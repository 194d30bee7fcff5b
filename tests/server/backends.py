"""Backends whose artifacts say which picture they are of, so that any swap or loss shows."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Sequence

import PIL.Image
import pybase64
import torch

from retinue.encoder import Preprocessed, VisionEncoderBackend
from retinue.errors import BackendLost
from retinue.media import Image

from .asgi import SOON_S

WIDTH = 4


def png(tag: int, width: int = 8, height: int = 8) -> bytes:
    """A picture whose color says which it is."""
    file = io.BytesIO()
    PIL.Image.new("RGB", (width, height), (tag % 256, tag // 256, 7)).save(file, "PNG")
    return file.getvalue()


def data_url(tag: int, width: int = 8, height: int = 8) -> str:
    return "data:image/png;base64," + pybase64.b64encode(png(tag, width, height)).decode()


def rows_of(tag: int) -> torch.Tensor:
    """The artifact of picture ``tag``: (1 to 5 rows, WIDTH)."""
    count = 1 + tag % 5
    return torch.full((count, WIDTH), float(tag)) + torch.arange(count)[:, None] / 100


class Tags(VisionEncoderBackend[Image, int, torch.Tensor]):
    """Encodes a picture to ``rows_of`` its tag; what is in ``fault`` is raised by every forward."""

    max_batch_cost = 8

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.fault: BaseException | None = None

    def build(self, model_id: str) -> None:
        pass

    def preprocess(self, raw: Image) -> Preprocessed[int]:
        red, green, _ = raw.decode().getpixel((0, 0))  # type: ignore[misc]  # it is RGB
        return Preprocessed(int(red) + 256 * int(green))

    def forward_batch(self, items: Sequence[int], target_bucket: int | None = None) -> list[torch.Tensor]:
        self.calls.append(list(items))
        if self.fault is not None:
            raise self.fault
        return [rows_of(tag) for tag in items]


class Gated(Tags):
    """``Tags`` whose first forward parks until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self._inside = threading.Event()
        self._let = threading.Event()

    def forward_batch(self, items: Sequence[int], target_bucket: int | None = None) -> list[torch.Tensor]:
        artifacts = super().forward_batch(items)
        if len(self.calls) == 1:
            self._inside.set()
            assert self._let.wait(SOON_S), "nobody opened the gate"
        return artifacts

    async def inside(self) -> None:
        """Wait until the first forward is inside."""
        assert await asyncio.to_thread(self._inside.wait, SOON_S)

    def open(self) -> None:
        """Let it go."""
        self._let.set()


class Doomed(Tags):
    """``Tags`` that is lost with every forward."""

    def forward_batch(self, items: Sequence[int], target_bucket: int | None = None) -> list[torch.Tensor]:
        raise BackendLost("the device is gone")
