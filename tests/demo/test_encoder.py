"""The demo's backend: what it does with pictures of every kind, and that neighbours do not matter."""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from retinue import AsyncVisionEncoder, InvalidInput
from retinue.demo.encoder import CHECKPOINT, DigitsEncoder
from retinue.demo.run import pictures
from retinue.demo.vision import VisionConfig

ALBUM = pictures()


@pytest.fixture(scope="module")
def backend() -> Iterator[DigitsEncoder]:
    backend = DigitsEncoder()
    backend.build("demo")
    yield backend
    backend.close()


def encoded(picture: PIL.Image.Image, format: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    picture.save(file, format, **options)
    return file.getvalue()


def test_the_rows_of_a_picture_are_the_same_alone_and_among_seven_other_sizes(backend: DigitsEncoder) -> None:
    sizes = [(8, 8), (48, 48), (16, 40), (400, 30), (33, 77), (24, 24), (48, 8), (200, 100)]
    rng = np.random.default_rng(0)
    items = [
        backend.preprocess(encoded(PIL.Image.fromarray(rng.integers(0, 256, (h, w, 3), np.uint8)))).item
        for w, h in sizes
    ]
    together = backend.forward_batch(items)
    for item, in_company in zip(items, together, strict=True):
        [alone] = backend.forward_batch([item])
        torch.testing.assert_close(in_company, alone, atol=1e-4, rtol=0)


def test_an_artifact_has_as_many_rows_as_it_costs_and_storage_of_its_own(backend: DigitsEncoder) -> None:
    prepared = [backend.preprocess(picture.data) for picture in ALBUM[:6]]
    artifacts = backend.forward_batch([image.item for image in prepared])
    for image, artifact in zip(prepared, artifacts, strict=True):
        assert artifact.shape == (image.cost, backend.hidden_size)
        assert artifact.dtype == torch.float32
        assert artifact.untyped_storage().nbytes() == artifact.numel() * 4
    assert len({artifact.untyped_storage().data_ptr() for artifact in artifacts}) == len(artifacts)


def test_a_forward_leaves_earlier_artifacts_alone(backend: DigitsEncoder) -> None:
    first, second = (backend.preprocess(picture.data).item for picture in ALBUM[:2])
    [artifact] = backend.forward_batch([first])
    before = artifact.clone()
    backend.forward_batch([second])
    assert torch.equal(artifact, before)


@given(width=st.integers(1, 5000), height=st.integers(1, 5000))
def test_a_grid_has_at_least_one_and_at_most_max_cells(width: int, height: int) -> None:
    config = VisionConfig()
    columns, rows = config.grid(width, height)
    assert columns >= 1
    assert rows >= 1
    assert columns * rows <= config.max_cells


GREY = PIL.Image.fromarray(np.arange(32 * 32, dtype=np.uint16).reshape(32, 32) * 64)


@pytest.mark.parametrize(
    ("data", "cost"),
    [
        (encoded(PIL.Image.new("RGB", (1, 1))), 3),
        (encoded(GREY), 18),
        (encoded(PIL.Image.new("RGBA", (16, 16), (255, 0, 0, 128))), 6),
        (encoded(PIL.Image.new("CMYK", (16, 16)), "JPEG"), 6),
        (encoded(PIL.Image.new("P", (16, 16))), 6),
        (encoded(PIL.Image.new("L", (16, 48)), "WEBP"), 14),
    ],
    ids=["1x1", "16-bit", "RGBA", "CMYK", "palette", "grey webp"],
)
def test_pictures_of_every_kind_are_read(backend: DigitsEncoder, data: bytes, cost: int) -> None:
    prepared = backend.preprocess(data)
    [artifact] = backend.forward_batch([prepared.item])
    assert prepared.cost == cost
    assert artifact.isfinite().all()


def test_a_picture_that_exif_says_is_lying_is_turned_upright(backend: DigitsEncoder) -> None:
    upright = PIL.Image.new("RGB", (16, 40), "white")
    upright.paste("black", (0, 0, 16, 8))
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    lying = encoded(upright.transpose(PIL.Image.Transpose.ROTATE_90), "PNG", exif=exif)
    expected, got = backend.preprocess(encoded(upright)).item, backend.preprocess(lying).item
    assert torch.equal(expected, got)


BAD = {
    "nothing": b"",
    "no picture": b"<html>not found</html>",
    "truncated": encoded(PIL.Image.effect_noise((64, 64), 80), "JPEG")[:700],
    "4x10000": encoded(PIL.Image.new("RGB", (4, 10000))),
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD.keys())
async def test_a_bad_image_is_named_by_its_position_and_the_others_are_answered(data: bytes) -> None:
    good = ALBUM[0].data
    async with AsyncVisionEncoder(DigitsEncoder(), "demo") as encoder:
        with pytest.raises(InvalidInput, match=r"^image 2 of 3: "):
            await encoder.encode([good, data, good])
        assert len(await encoder.encode([good, good])) == 2


def test_the_checkpoint_is_small_and_keeps_its_vision_weights_in_a_folder_of_their_own() -> None:
    files = [path for path in CHECKPOINT.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 3_000_000
    assert {path.relative_to(CHECKPOINT).as_posix() for path in files if path.suffix == ".safetensors"} == {
        "model.safetensors",
        "vision/model.safetensors",
    }
