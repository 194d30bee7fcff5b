"""Prompts for vLLM, as far as they can be judged without it: the promises of ``retinue.decoders.vllm``.

``tests/vllm`` gives them to a real engine.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BloomConfig, GPT2Config, LlamaConfig, LlavaConfig

from retinue.decoders.vllm import EngineModel
from retinue.errors import EncoderFailed, InvalidInput
from retinue.prompt.tensors import Prompt, splice

IMAGE = 7
WIDTH = 4
MODEL = EngineModel(hidden_size=WIDTH, context=12, vocab_size=10, dtype=torch.float32)


def artifact(rows: int, value: float = 1.0) -> torch.Tensor:
    return torch.full((rows, WIDTH), value)


def engine_config(**changes: Any) -> SimpleNamespace:
    """As much of vLLM's ``ModelConfig`` as is read; ``tests/vllm`` reads the real one."""
    fields = {
        "enable_prompt_embeds": True,
        "max_model_len": 12,
        "dtype": torch.bfloat16,
        "get_inputs_embeds_size": lambda: WIDTH,
        "get_vocab_size": lambda: 10,
    }
    return SimpleNamespace(**{**fields, **changes})


# ---- what is made


def test_a_prompt_has_ids_mask_and_embeddings_of_one_length() -> None:
    first, second = artifact(2, 1.0), artifact(1, 2.0)
    prompt = MODEL.prompt([1, IMAGE, 2, IMAGE], IMAGE, [first, second])
    assert prompt.keys() == {"prompt_token_ids", "prompt_is_token_ids", "prompt_embeds"}
    assert prompt["prompt_token_ids"] == [1, IMAGE, IMAGE, 2, IMAGE]
    assert prompt["prompt_is_token_ids"] == [True, False, False, True, False]
    expected = torch.cat([torch.zeros(1, WIDTH), first, torch.zeros(1, WIDTH), second])
    assert torch.equal(prompt["prompt_embeds"], expected)


def test_mask_and_ids_are_plain_whatever_they_were_made_of() -> None:
    ids: Any = np.array([1, IMAGE])
    mask: Any = np.array([True, False])
    made = MODEL.prompt(ids, ids[1], [artifact(2)])
    for prompt in (made, MODEL.accept(Prompt(ids, mask, torch.zeros(2, WIDTH)))):
        assert {type(flag) for flag in prompt["prompt_is_token_ids"]} == {bool}
        assert {type(token_id) for token_id in prompt["prompt_token_ids"]} == {int}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_embeddings_have_the_models_dtype(dtype: torch.dtype) -> None:
    model = EngineModel(hidden_size=WIDTH, context=12, vocab_size=10, dtype=torch.bfloat16)
    embeds = model.prompt([IMAGE], IMAGE, [artifact(2).to(dtype)])["prompt_embeds"]
    assert torch.equal(embeds, artifact(2).bfloat16())


@pytest.mark.parametrize("marker", [-1, 10, 2**40])
def test_a_placeholder_that_no_text_can_spell_becomes_an_id_that_the_engine_has(marker: int) -> None:
    prompt = MODEL.prompt([1, marker, 2], marker, [artifact(2)])
    assert prompt["prompt_token_ids"] == [1, 0, 0, 2]
    assert prompt["prompt_is_token_ids"] == [True, False, False, True]


def test_text_without_images_is_a_prompt_of_token_ids_alone() -> None:
    assert MODEL.prompt([1, 2], IMAGE, []) == {"prompt_token_ids": [1, 2]}


# ---- what is refused


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.ones(WIDTH), "has shape (4,), not (rows, 4)"),
        (torch.ones(1, 2, WIDTH), "has shape (1, 2, 4), not (rows, 4)"),
        (torch.ones(2, WIDTH // 2), "has shape (2, 2), not (rows, 4)"),
        (torch.ones(0, WIDTH), "has shape (0, 4), not (rows, 4) with 1 row or more"),
        (torch.ones(2, WIDTH, dtype=torch.int64), "has dtype torch.int64"),
        (torch.full((2, WIDTH), float("nan")), "values that are not finite"),
        (torch.full((2, WIDTH), float("inf")), "values that are not finite"),
    ],
    ids=["1-D", "3-D", "half as wide", "no rows", "integers", "NaN", "infinity"],
)
def test_a_bad_artifact_is_the_encoders_fault_and_is_named(bad: torch.Tensor, message: str) -> None:
    with pytest.raises(EncoderFailed, match=f"^image 2 of 3: .*{re.escape(message)}"):
        MODEL.prompt([IMAGE] * 3, IMAGE, [artifact(1), bad, artifact(1)])


def test_values_too_large_for_the_models_dtype_are_the_encoders_fault() -> None:
    half = EngineModel(hidden_size=WIDTH, context=12, vocab_size=10, dtype=torch.float16)
    with pytest.raises(EncoderFailed, match=r"^image 2 of 2: .* not finite in torch\.float16$"):
        half.prompt([IMAGE] * 2, IMAGE, [artifact(1), artifact(1, 70000.0)])


def test_large_values_are_finite_even_where_their_sum_is_not() -> None:
    large = artifact(8, 3e38)
    assert torch.equal(MODEL.prompt([IMAGE], IMAGE, [large])["prompt_embeds"], large)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"token_ids": []}, InvalidInput, "the prompt is empty"),
        ({"is_token_ids": [True]}, InvalidInput, "the prompt has 3 token ids and 1 is_token_ids"),
        ({"embeds": artifact(2)}, EncoderFailed, "embeddings have shape (2, 4), not (3, 4)"),
        ({"embeds": torch.zeros(3, 5)}, EncoderFailed, "embeddings have shape (3, 5), not (3, 4)"),
        ({"embeds": torch.full((3, 4), torch.nan)}, EncoderFailed, "not all finite in torch.float32"),
    ],
)
def test_a_prompt_that_was_made_elsewhere_is_checked_as_well(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    prompt = splice([1, IMAGE], IMAGE, [artifact(2)], hidden_size=WIDTH)
    assert "prompt_embeds" in MODEL.accept(prompt)
    with pytest.raises(error, match=re.escape(message)):
        MODEL.accept(replace(prompt, **changes))


@pytest.mark.parametrize(
    ("token_ids", "images", "message"),
    [
        ([], 0, "the prompt is empty"),
        ([1, IMAGE], 2, "the prompt has 1 image placeholders (token 7) and there are 2 images"),
        ([1, IMAGE], 0, "the prompt has 1 image placeholders (token 7) and there are 0 images"),
        ([1, 10], 0, "prompt token 1 is 10, outside the vocabulary of 10"),
        ([IMAGE, -2], 1, "prompt token 1 is -2, outside the vocabulary of 10"),
    ],
)
def test_a_bad_prompt_is_the_callers_fault(token_ids: list[int], images: int, message: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{re.escape(message)}$"):
        MODEL.prompt(token_ids, IMAGE, [artifact(1)] * images)


def test_a_prompt_may_leave_room_for_one_token_and_not_for_none() -> None:
    assert len(MODEL.prompt([1, 2, IMAGE], IMAGE, [artifact(9)])["prompt_token_ids"]) == 11
    with pytest.raises(InvalidInput, match=r"12 tokens, of which images are 10; .*12 leaves room for 11$"):
        MODEL.prompt([1, 2, IMAGE], IMAGE, [artifact(10)])
    assert MODEL.prompt([1] * 11, IMAGE, [])
    with pytest.raises(InvalidInput, match=r"text alone has 12 tokens; .*12 leaves room for 11$"):
        MODEL.prompt([1] * 12, IMAGE, [])


def test_no_embeddings_are_made_for_a_text_that_is_too_long() -> None:
    wide = EngineModel(hidden_size=2**40, context=12, vocab_size=10, dtype=torch.float32)
    with pytest.raises(InvalidInput, match="text alone has 1000000 tokens"):
        wide.prompt([1] * 10**6 + [IMAGE], IMAGE, [torch.empty(1, 2**40, device="meta")])


# ---- where the numbers come from


def test_the_model_is_read_from_an_engines_config() -> None:
    assert EngineModel.of(engine_config()) == EngineModel(
        hidden_size=WIDTH, context=12, vocab_size=10, dtype=torch.bfloat16
    )


def test_an_engine_that_takes_no_embeddings_is_refused_before_the_first_request() -> None:
    with pytest.raises(ValueError, match="give it enable_prompt_embeds=True"):
        EngineModel.of(engine_config(enable_prompt_embeds=False))


def test_the_model_is_read_from_a_hugging_face_config_too() -> None:
    text = LlamaConfig(hidden_size=64, max_position_embeddings=99, vocab_size=50, dtype="bfloat16")
    expected = EngineModel(hidden_size=64, context=99, vocab_size=50, dtype=torch.bfloat16)
    assert EngineModel.of(text) == expected
    text.dtype = "bfloat16"  # as ``from_pretrained`` leaves it when it is told so
    assert EngineModel.of(text) == expected
    assert EngineModel.of(LlavaConfig(text_config=text)) == expected
    assert EngineModel.of(GPT2Config(n_embd=64, n_positions=99)).dtype == torch.float32


def test_a_config_that_does_not_say_enough_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^BloomConfig does not say its max_position_embeddings$"):
        EngineModel.of(BloomConfig())


def test_the_module_is_imported_without_vllm_and_without_transformers() -> None:
    program = "import sys, retinue.decoders.vllm; print({'vllm', 'transformers'} & set(sys.modules))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout == "set()\n"
