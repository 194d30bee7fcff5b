"""Artifacts in a prompt: the promises of ``retinue.prompt.tensors``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from retinue.errors import EncoderFailed, InvalidInput
from retinue.prompt.tensors import all_finite, splice

IMAGE = 7
HIDDEN = 4


def artifact(rows: int, value: float = 1.0) -> torch.Tensor:
    return torch.full((rows, HIDDEN), value)


def test_artifacts_lie_at_their_placeholders_and_text_rows_are_zero() -> None:
    first, second = artifact(2, 1.0), artifact(1, 2.0)
    prompt = splice([1, IMAGE, 2, IMAGE], IMAGE, [first, second], hidden_size=HIDDEN)
    assert prompt.token_ids == [1, IMAGE, IMAGE, 2, IMAGE]
    assert prompt.is_token_ids == [True, False, False, True, False]
    assert torch.equal(prompt.embeds, torch.cat([torch.zeros(1, 4), first, torch.zeros(1, 4), second]))


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_every_row_of_every_artifact_arrives_once_and_in_order(rows: list[int], data: st.DataObject) -> None:
    ids = data.draw(st.permutations([IMAGE] * len(rows) + [1, 2, 3]))
    artifacts = [torch.randn(count, HIDDEN) for count in rows]
    prompt = splice(ids, IMAGE, artifacts, hidden_size=HIDDEN)
    is_text = torch.tensor(prompt.is_token_ids)
    assert prompt.embeds.shape == (len(prompt.token_ids), HIDDEN)
    assert torch.equal(prompt.embeds[~is_text], torch.cat([torch.zeros(0, HIDDEN), *artifacts]))
    assert not prompt.embeds[is_text].any()


def test_a_prompt_without_images_is_all_text() -> None:
    prompt = splice([1, 2], IMAGE, [], hidden_size=HIDDEN)
    assert prompt.is_token_ids == [True, True]
    assert torch.equal(prompt.embeds, torch.zeros(2, HIDDEN))


def test_the_embeddings_share_no_memory_with_an_artifact() -> None:
    image = artifact(2)
    prompt = splice([IMAGE], IMAGE, [image], hidden_size=HIDDEN)
    image.fill_(9.0)
    assert torch.equal(prompt.embeds, artifact(2))


def test_the_embeddings_have_the_artifacts_dtype_unless_told_otherwise() -> None:
    images = [artifact(1).bfloat16(), artifact(2).bfloat16()]
    ids = [IMAGE, IMAGE]
    assert splice(ids, IMAGE, images, hidden_size=HIDDEN).embeds.dtype == torch.bfloat16
    assert splice(ids, IMAGE, images, hidden_size=HIDDEN, dtype=torch.float32).embeds.dtype == torch.float32


def test_artifacts_of_several_dtypes_meet_in_one_that_holds_them_all() -> None:
    images = [artifact(1).bfloat16(), artifact(1).half()]
    assert splice([IMAGE, IMAGE], IMAGE, images, hidden_size=HIDDEN).embeds.dtype == torch.float32


def test_gradients_strides_and_inference_mode_do_not_reach_the_prompt() -> None:
    strided = torch.ones(2, 2 * HIDDEN, requires_grad=True)[:, ::2]
    with torch.inference_mode():
        inference = artifact(2)
    embeds = splice([IMAGE, IMAGE], IMAGE, [strided, inference], hidden_size=HIDDEN).embeds
    assert embeds.is_contiguous()
    assert not embeds.requires_grad
    assert not embeds.is_inference()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_artifact_on_the_accelerator_arrives_on_the_cpu() -> None:
    embeds = splice([IMAGE], IMAGE, [artifact(2).cuda()], hidden_size=HIDDEN).embeds
    assert torch.equal(embeds, artifact(2))


def test_a_read_only_array_is_an_artifact_too() -> None:
    array = np.ones((2, HIDDEN), dtype=np.float32)
    array.setflags(write=False)
    assert torch.equal(splice([IMAGE], IMAGE, [array], hidden_size=HIDDEN).embeds, artifact(2))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_count_mismatch_is_the_callers_fault(count: int) -> None:
    with pytest.raises(InvalidInput, match=f"2 image placeholders .* {count} images"):
        splice([IMAGE, 1, IMAGE], IMAGE, [artifact(1)] * count, hidden_size=HIDDEN)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.ones(HIDDEN), r"has shape \(4,\), not \(rows, 4\)"),
        (torch.ones(1, 2, HIDDEN), r"has shape \(1, 2, 4\), not \(rows, 4\)"),
        (torch.ones(2, HIDDEN + 1), r"has shape \(2, 5\), not \(rows, 4\)"),
        (torch.ones(0, HIDDEN), r"has shape \(0, 4\), not \(rows, 4\) with 1 row or more"),
        (torch.ones(2, HIDDEN, dtype=torch.int64), "has dtype torch.int64"),
        (torch.ones(2, HIDDEN, dtype=torch.complex64), "has dtype torch.complex64"),
        (torch.full((2, HIDDEN), float("nan")), "values that are not finite"),
        (torch.full((2, HIDDEN), float("inf")), "values that are not finite"),
        (torch.ones(2, HIDDEN, device="meta"), "a Tensor, cannot be read as a tensor"),
        (None, "a NoneType, cannot be read as a tensor"),
        ([[1.0], [1.0, 2.0]], "a list, cannot be read as a tensor"),
    ],
)
def test_a_bad_artifact_is_the_encoders_fault_and_is_named(bad: Any, message: str) -> None:
    with pytest.raises(EncoderFailed, match=f"image 2 of 3: its artifact.*{message}"):
        splice([IMAGE] * 3, IMAGE, [artifact(1), bad, artifact(1)], hidden_size=HIDDEN)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_values_whose_sum_is_too_large_are_finite_and_those_that_cancel_are_not(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    assert all_finite(torch.full((300, 300), largest, dtype=dtype))
    assert all_finite(torch.tensor([largest, -largest], dtype=dtype))
    assert not all_finite(torch.tensor([torch.inf, -torch.inf, 1.0], dtype=dtype))
    assert not all_finite(torch.tensor([1.0, torch.nan], dtype=dtype))
    assert not all_finite(torch.tensor([1.0, 0, 1, 0, torch.nan, 0], dtype=dtype)[::2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rest", [0x00, 0xFF])
def test_whether_a_value_is_finite_is_told_for_every_exponent(dtype: torch.dtype, rest: int) -> None:
    exponents = torch.arange(2**16, dtype=torch.int32).to(torch.int16)  # with the sign and some digits
    halves = torch.full((2**16, dtype.itemsize // 2), rest | rest << 8, dtype=torch.int32).to(torch.int16)
    halves[:, -1 if sys.byteorder == "little" else 0] = exponents
    values = halves.view(dtype).view(256, 256)
    for row, finite in zip(values, values.isfinite(), strict=True):
        assert all_finite(row) == bool(finite.all())
        assert all_finite(row[:1]) == bool(finite[0])


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux, to count threads")
def test_none_of_torchs_other_threads_is_put_to_work() -> None:
    """They begin with the first tensor that is large enough for two."""
    program = """
import os, torch
from retinue.prompt.tensors import all_finite, splice
from retinue.server.embeds import Embeds

torch.set_num_threads(3)
batch = torch.empty(2, 600, 2048)
for row in batch.view(-1, 2048):
    row.fill_(1.0)
count = lambda: len(os.listdir("/proc/self/task"))
before = count()
for artifact in (batch[0], batch[1, :, ::2]):
    width = artifact.shape[1]
    token_ids = [5] * 600 + [-1] + [5] * 600
    splice(token_ids, -1, [artifact], hidden_size=width)
    splice(token_ids, -1, [artifact], hidden_size=width, dtype=torch.bfloat16)
    assert all_finite(artifact)
    Embeds(artifact, 1, 1).text()
print(count() - before)
artifact.clone()
print(count() - before)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert ended.stdout == "0\n2\n"
