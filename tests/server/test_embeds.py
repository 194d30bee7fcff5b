"""``Embeds``: an artifact written as vLLM's public format has it, to the byte."""

from __future__ import annotations

import io
import zipfile

import pybase64
import pytest
import torch

from retinue.errors import EncoderFailed
from retinue.server.embeds import Embeds, soon_written

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
#: One value, a few, one row, several; and around the size up to which tensors count as small, in float32.
SHAPES = [(1, 1), (1, 3), (2, 4), (1, 576), (64, 128), (128, 128), (129, 128)]


def written(artifact: torch.Tensor) -> bytes:
    return pybase64.b64decode(Embeds(artifact, 1, 1).text(), validate=True)


def records(saved: bytes) -> dict[str, bytes]:
    """What is in an archive, with its checksums checked; but for its id, which is a hash of the rest."""
    with zipfile.ZipFile(io.BytesIO(saved)) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("_id")}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tensor_is_written_as_torch_save_writes_it(shape: tuple[int, int], dtype: torch.dtype) -> None:
    for seed in range(3):
        tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
        file = io.BytesIO()
        torch.save(tensor, file)
        saved = written(tensor)
        assert len(saved) == len(file.getvalue())
        assert records(saved) == records(file.getvalue())
        assert torch.equal(torch.load(io.BytesIO(saved), weights_only=True), tensor)


def test_shapes_of_one_size_are_not_mistaken_for_each_other() -> None:
    for shape in ((2, 12), (3, 8), (4, 6), (2, 12)):
        tensor = torch.arange(24.0).view(shape)
        assert torch.equal(torch.load(io.BytesIO(written(tensor)), weights_only=True), tensor)


@pytest.mark.parametrize(
    "view",
    [
        torch.arange(24.0).view(4, 6).T,
        torch.arange(24.0).view(4, 6)[1:3],
        torch.arange(24.0).view(4, 6)[:, ::2],
        torch.arange(6.0).expand(4, 6),
        torch.nn.Parameter(torch.arange(24.0).view(4, 6)),
    ],
    ids=["transposed", "rows", "columns", "expanded", "a parameter"],
)
def test_a_view_is_written_as_its_values(view: torch.Tensor) -> None:
    loaded = torch.load(io.BytesIO(written(view)), weights_only=True)
    assert torch.equal(loaded, view)
    assert not Embeds(view, 1, 1).rows().requires_grad
    assert len(written(view)) < 2000


@pytest.mark.parametrize("rows", [2, 2000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_a_value_that_is_not_finite_is_found_wherever_it_is(
    value: float, dtype: torch.dtype, rows: int
) -> None:
    for place in (0, rows * 64 // 2, rows * 64 - 1):
        artifact = torch.full((rows, 64), torch.finfo(dtype).max, dtype=dtype)
        assert Embeds(artifact, 1, 1).rows() is not None  # their sum is infinite, and they are not
        artifact.view(-1)[place] = value
        with pytest.raises(EncoderFailed, match="image 3 of 4: its artifact has values that are not finite"):
            Embeds(artifact, 3, 4).text()


@pytest.mark.parametrize(
    ("artifacts", "soon"),
    [
        ([torch.zeros(16, 128)], True),
        ([torch.zeros(128, 128)], True),
        ([torch.zeros(129, 128)], False),
        ([torch.zeros(64, 128)] * 2, True),
        ([torch.zeros(65, 128)] * 2, False),
        ([torch.zeros(2, 2, device="meta")], False),
        ([[[1.0, 2.0]]], False),
        ([torch.zeros(16, 128), [[1.0, 2.0]]], False),
    ],
    ids=["small", "64 KiB", "more", "two", "two too many", "on a device", "no tensor", "one is no tensor"],
)
def test_only_a_few_bytes_that_are_in_memory_are_soon_written(artifacts: list[object], soon: bool) -> None:
    assert soon_written(Embeds.of(artifacts)) == soon
