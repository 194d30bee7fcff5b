"""The vision half of a model, served: everything is as in the whole model, alone and in company."""

from __future__ import annotations

import asyncio
import io
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import AutoModelForCausalLM

from retinue import AsyncVisionEncoder, BatchRecord, InvalidInput, Preprocessed, load_backend
from retinue.decoders.transformers import GenerationOptions, TransformersDecoder
from retinue.encoders.hf import HFVisionEncoder, Item
from retinue.media import Image
from retinue.prompt.tensors import Prompt, splice

from .conftest import PICTURES, REQUESTS, Case, pictures
from .tiny import HIDDEN, NEW_TOKENS, picture

Encoder = AsyncVisionEncoder[Any, Item, Tensor]

OPTIONS = GenerationOptions(max_new_tokens=NEW_TOKENS)


@pytest.fixture
def backend(case: Case) -> Iterator[HFVisionEncoder]:
    backend = HFVisionEncoder(device="cpu")
    backend.build(str(case.halves.encoder))
    yield backend
    backend.close()


def alone(backend: HFVisionEncoder, picture: PIL.Image.Image) -> Tensor:
    [artifact] = backend.forward_batch([backend.preprocess(picture).item])
    return artifact


def spliced(case: Case, artifacts: list[Tensor]) -> Prompt:
    return splice(case.token_ids(len(artifacts)), case.placeholder_id, artifacts, hidden_size=HIDDEN)


def by_key(prepared: list[Preprocessed[Item]]) -> list[list[int]]:
    """Which of the images may share a batch."""
    keys = [image.key for image in prepared]
    return [[n for n, other in enumerate(keys) if other == key] for key in dict.fromkeys(keys)]


# ---- as in the whole model


def test_the_language_model_sees_row_by_row_what_it_saw_before(case: Case, backend: HFVisionEncoder) -> None:
    table = AutoModelForCausalLM.from_pretrained(case.halves.text, dtype=torch.float32).get_input_embeddings()
    for request, (_, before) in zip(REQUESTS, case.before, strict=True):
        prompt = spliced(case, [alone(backend, picture) for picture in pictures(request)])
        is_token = torch.tensor(prompt.is_token_ids)[:, None]  # (length, 1)
        now = torch.where(is_token, table(torch.tensor(prompt.token_ids)), prompt.embeds)  # (length, hidden)
        torch.testing.assert_close(now, before, atol=1e-4, rtol=0)


async def test_greedy_tokens_are_those_of_the_whole_model_alone_and_among_strangers(case: Case) -> None:
    expected = [tokens for tokens, _ in case.before]
    assert len({tuple(tokens) for tokens in expected}) == len(REQUESTS), "pictures make no difference"
    folder = str(case.halves.encoder)
    batches = Batches()
    async with (
        AsyncVisionEncoder(HFVisionEncoder(device="cpu"), folder) as at_once,
        AsyncVisionEncoder(
            HFVisionEncoder(device="cpu"), folder, max_wait_s=0.5, observer=batches
        ) as patient,
        TransformersDecoder(case.halves.text, dtype=torch.float32, device="cpu") as decoder,
    ):

        async def answer(encoder: Encoder, request: tuple[int, ...]) -> list[int]:
            prompt = spliced(case, await encoder.encode(pictures(request)))
            return (await decoder.generate(prompt, OPTIONS)).token_ids

        assert [await answer(at_once, request) for request in REQUESTS] == expected
        assert await asyncio.gather(*(answer(patient, request) for request in REQUESTS)) == expected
    assert max(batches.items) > 1, "no batch had more than one image"


class Batches:
    """How many images each forward had."""

    def __init__(self) -> None:
        self.items: list[int] = []

    def on_batch(self, record: BatchRecord) -> None:
        self.items.append(record.items)

    def on_request(self, record: object) -> None:
        pass


# ---- batching


def test_an_artifact_is_the_same_alone_and_among_strangers(backend: HFVisionEncoder) -> None:
    shown = [*PICTURES, picture(40, 30, 5), picture(90, 20, 6), picture(64, 64, 7)]
    prepared = [backend.preprocess(picture) for picture in shown]
    for members in by_key(prepared):
        together = backend.forward_batch([prepared[n].item for n in members])
        for n, artifact in zip(members, together, strict=True):
            torch.testing.assert_close(artifact, alone(backend, shown[n]), atol=1e-4, rtol=0)


def test_a_batch_is_one_forward_of_the_tower(backend: HFVisionEncoder) -> None:
    prepared = [backend.preprocess(picture(40, 30, seed)) for seed in range(3)]
    assert len(by_key(prepared)) == 1
    calls: Counter[int] = Counter()

    def count(module: nn.Module, _: Any) -> None:
        if isinstance(module, nn.Conv2d):  # which cuts the pixels into patches
            calls[id(module)] += 1

    hook = register_module_forward_pre_hook(count)
    try:
        backend.forward_batch([image.item for image in prepared])
    finally:
        hook.remove()
    assert list(calls.values()) == [1]


def test_the_work_of_attention_grows_no_faster_than_the_batch(
    backend: HFVisionEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of the batch is a tile, never several in one sequence with a mask between them."""
    attend = torch.nn.functional.scaled_dot_product_attention
    seen: list[tuple[int, ...]] = []

    def look(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(tuple(query.shape))  # (tiles, heads, patches, width)
        return attend(query, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", look)
    items = [backend.preprocess(picture(40, 30, seed)).item for seed in range(3)]
    backend.forward_batch(items[:1])
    alone = list(seen)
    seen.clear()
    backend.forward_batch(items)
    assert alone
    assert seen == [(3 * tiles, *rest) for tiles, *rest in alone]


def test_images_of_other_sizes_share_a_batch_where_tiles_have_one_shape(
    case: Case, backend: HFVisionEncoder
) -> None:
    groups = by_key([backend.preprocess(picture) for picture in PICTURES])
    any_shape = case.whole.name in ("llava_pixtral", "mistral3")
    assert len(groups) == (len(PICTURES) if any_shape else 1)


def test_an_artifact_has_as_many_rows_as_it_costs_and_storage_of_its_own(backend: HFVisionEncoder) -> None:
    prepared = [backend.preprocess(picture(40, 30, seed)) for seed in range(3)]
    artifacts = backend.forward_batch([image.item for image in prepared])
    for image, artifact in zip(prepared, artifacts, strict=True):
        assert artifact.shape == (image.cost, HIDDEN)
        assert artifact.dtype == torch.float32
        assert artifact.device.type == "cpu"
        assert artifact.untyped_storage().nbytes() == artifact.numel() * 4
    assert len({artifact.untyped_storage().data_ptr() for artifact in artifacts}) == len(artifacts)


# ---- what it takes


def test_a_file_an_image_and_a_picture_are_preprocessed_alike(backend: HFVisionEncoder) -> None:
    shown = picture(40, 30)
    file = io.BytesIO()
    shown.save(file, "PNG")
    expected = backend.preprocess(shown)
    for raw in (file.getvalue(), Image(file.getvalue()), shown.convert("RGBA")):
        prepared = backend.preprocess(raw)
        assert torch.equal(prepared.item.tiles, expected.item.tiles)
        assert torch.equal(prepared.item.span, expected.item.span)
        assert (prepared.cost, prepared.key) == (expected.cost, expected.key)


def test_several_threads_may_preprocess_at_once(backend: HFVisionEncoder) -> None:
    rng = np.random.default_rng(0)
    shown = [picture(int(w), int(h), n) for n, (w, h) in enumerate(rng.integers(8, 90, (24, 2)))]
    expected = [backend.preprocess(picture) for picture in shown]
    with ThreadPoolExecutor(8) as pool:
        for one, other in zip(expected, pool.map(backend.preprocess, shown), strict=True):
            assert torch.equal(one.item.tiles, other.item.tiles)
            assert torch.equal(one.item.span, other.item.span)


async def test_a_bad_image_is_named_by_its_position(case: Case) -> None:
    async with AsyncVisionEncoder(HFVisionEncoder(device="cpu"), str(case.halves.encoder)) as encoder:
        with pytest.raises(InvalidInput, match=r"^image 2 of 2: "):
            await encoder.encode([PICTURES[0], b"<html>not found</html>"])


# ---- life


def test_it_is_found_by_its_name() -> None:
    assert isinstance(load_backend("retinue.encoders.hf:HFVisionEncoder"), HFVisionEncoder)


def test_a_folder_that_split_did_not_write_is_refused(case: Case) -> None:
    with pytest.raises(ValueError, match=r"retinue split.*spans\.json"):
        HFVisionEncoder().build(str(case.halves.text))


def test_it_runs_in_the_dtype_that_it_is_given(case: Case, backend: HFVisionEncoder) -> None:
    narrow = HFVisionEncoder(device="cpu", dtype=torch.bfloat16)
    narrow.build(str(case.halves.encoder))
    artifact = alone(narrow, PICTURES[0])
    assert artifact.dtype == torch.bfloat16
    wide = alone(backend, PICTURES[0])
    assert torch.nn.functional.cosine_similarity(artifact.float(), wide).min() > 0.9
