"""A vision transformer in PyTorch, for pictures of any size: keys, costs and buckets.

Run it:  python examples/torch_vit.py          (needs torch; random weights, so nothing is downloaded)

Three decisions of its author are the point:

-   ``key``: only pictures of one grid of patches share a batch, so a batch is one dense tensor.
-   ``cost``: a picture costs its patches, so ``max_batch_cost`` bounds memory, whatever the sizes; a number
    of pictures would not.
-   ``buckets``: a batch is filled up with blank pictures to the next of a few sizes, so that compiled kernels
    and captured CUDA graphs, one for each size, are found again.
"""

import asyncio

import torch
from torch import Tensor, nn

from retinue import (
    AsyncVisionEncoder,
    BatchRecord,
    InvalidInput,
    Preprocessed,
    RequestRecord,
    VisionEncoderBackend,
)

PATCH, WIDTH, HIDDEN = 14, 64, 128  # pixels; rows within the encoder; rows of the language model


class VisionTransformer(nn.Module):
    """Patches, two layers, and a projection to the width of the language model."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, kernel_size=PATCH, stride=PATCH)
        self.frequencies = nn.Parameter(torch.randn(2, WIDTH))  # for positions on grids of any size
        layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=2 * WIDTH, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=2)
        self.project = nn.Linear(WIDTH, HIDDEN)

    def forward(self, pixels: Tensor) -> Tensor:
        """(batch, 3, height, width) to (batch, patches, HIDDEN)."""
        grid = self.patches(pixels)  # (batch, WIDTH, rows, columns)
        rows, columns = grid.shape[2:]
        places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).to(pixels)  # (patches, 2)
        x = grid.flatten(2).transpose(1, 2) + torch.sin(places @ self.frequencies)  # (batch, patches, WIDTH)
        return self.project(self.layers(x))  # type: ignore[no-any-return]  # nn.Module's calls are Any


class VitBackend(VisionEncoderBackend[Tensor, Tensor, Tensor]):
    """From (3, height, width) uint8 to (patches, HIDDEN), on the best device there is."""

    buckets = (64, 128, 256)  # patches
    max_batch_cost = 256

    def build(self, model_id: str) -> None:
        torch.manual_seed(0)  # in place of loading the weights of ``model_id``
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = VisionTransformer().to(self.device).eval()
        self.forward_batch(
            [torch.zeros(3, 16 * PATCH, 16 * PATCH)], target_bucket=256
        )  # the largest: it fits

    def preprocess(self, raw: Tensor) -> Preprocessed[Tensor]:
        if raw.ndim != 3 or raw.shape[0] != 3 or min(raw.shape[1:]) < PATCH:
            raise InvalidInput(f"(3, height, width) is needed, {PATCH} px at least, got {tuple(raw.shape)}")
        rows, columns = raw.shape[1] // PATCH, raw.shape[2] // PATCH
        pixels = raw[:, : rows * PATCH, : columns * PATCH].float() / 127.5 - 1  # (3, height, width)
        return Preprocessed(pixels, cost=rows * columns, key=(rows, columns))

    @torch.inference_mode()
    def forward_batch(self, items: list[Tensor], target_bucket: int | None = None) -> list[Tensor]:
        pixels = torch.stack(items).to(self.device)  # (batch, 3, height, width)
        patches = pixels.shape[2] * pixels.shape[3] // PATCH**2
        blank = (target_bucket or 0) // patches - len(items)
        if blank > 0:
            pixels = torch.cat([pixels, pixels.new_zeros(blank, *pixels.shape[1:])])
        artifacts = self.model(pixels)[: len(items)].cpu()  # (batch, patches, HIDDEN); waits for the device
        return [artifact.clone() for artifact in artifacts]  # each caller keeps its own rows, not the batch


class Watch:
    """An observer: hears of every batch and of every request as they end."""

    def __init__(self) -> None:
        self.batches: list[BatchRecord] = []

    def on_batch(self, record: BatchRecord) -> None:
        self.batches.append(record)

    def on_request(self, record: RequestRecord) -> None:
        pass


async def main() -> None:
    generator = torch.Generator().manual_seed(1)

    def picture(height: int, width: int) -> Tensor:
        return torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=generator)

    watch = Watch()
    async with AsyncVisionEncoder(VitBackend(), "a-vit", observer=watch) as encoder:
        pictures = [picture(*size) for size in [(56, 56), (112, 56), (224, 112)] * 8]
        together = [rows for [rows] in await asyncio.gather(*(encoder.encode([one]) for one in pictures))]
        print(f"artifacts: {sorted({tuple(rows.shape) for rows in together})}")

        alone = [(await encoder.encode([one]))[0] for one in pictures[:3]]
        for one, shared in zip(alone, together, strict=False):
            torch.testing.assert_close(one, shared, rtol=1e-3, atol=1e-3)
        print("alone or in company, a picture's artifact is the same")

        try:
            await encoder.encode([picture(56, 56), picture(7, 56)])
        except InvalidInput as error:
            print(f"refused: {error}")

    for batch in watch.batches:
        print(f"{batch.items} pictures of {batch.key} patches: cost {batch.cost}, bucket {batch.bucket}")


if __name__ == "__main__":
    asyncio.run(main())
