"""The halves of a model on vLLM: its greedy tokens are those that transformers gave for the whole."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine

from retinue.encoders.hf import HFVisionEncoder
from retinue.prompt.tensors import splice

from ..encoders.conftest import PICTURES, REQUESTS, Case, made
from ..encoders.tiny import FAMILIES, HIDDEN, NEW_TOKENS
from .conftest import Engine

PARAMS = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return made(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def text(case: Case) -> Iterator[Engine]:
    """The text half in vLLM, in this process."""
    arguments = EngineArgs(
        model=str(case.halves.text),
        dtype="float32",
        enable_prompt_embeds=True,
        max_model_len=1024,
        max_num_seqs=16,
        enforce_eager=True,
        distributed_executor_backend="uni",
        disable_log_stats=True,
    )
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        warnings.simplefilter("ignore")  # it looks at parts of PyTorch that are deprecated
        engine = LLMEngine.from_engine_args(arguments)
    yield Engine(engine)
    engine.engine_core.shutdown()
    del engine
    gc.collect()


def prompts(case: Case) -> list[dict[str, Any]]:
    """What a worker gives vLLM for each of ``REQUESTS``; pictures that may share a batch do."""
    backend = HFVisionEncoder(device="cpu")
    backend.build(str(case.halves.encoder))
    prepared = [backend.preprocess(picture) for picture in PICTURES]
    artifacts: dict[int, torch.Tensor] = {}
    for key in {image.key for image in prepared}:
        members = [n for n, image in enumerate(prepared) if image.key == key]
        artifacts.update(
            zip(members, backend.forward_batch([prepared[n].item for n in members]), strict=True)
        )
    spliced = [
        splice(
            case.token_ids(len(request)),
            case.placeholder_id,
            [artifacts[n] for n in request],
            hidden_size=HIDDEN,
        )
        for request in REQUESTS
    ]
    return [
        {
            "prompt_token_ids": prompt.token_ids,
            "prompt_is_token_ids": prompt.is_token_ids,
            "prompt_embeds": prompt.embeds,
        }
        for prompt in spliced
    ]


def tokens(engine: Engine, name: str) -> list[int]:
    return list(engine.finish(name).outputs[0].token_ids)


@pytest.mark.timeout(120)
def test_greedy_tokens_are_those_of_the_whole_model_alone_and_among_strangers(
    case: Case, text: Engine
) -> None:
    expected = [answer for answer, _ in case.before]
    assert len({tuple(answer) for answer in expected}) == len(REQUESTS), "pictures make no difference"
    asked = prompts(case)
    assert [tokens(text, text.add(prompt, PARAMS)) for prompt in asked] == expected
    names = [text.add(prompt, PARAMS) for prompt in asked]
    assert [tokens(text, name) for name in names] == expected


def test_the_text_half_is_a_text_model(case: Case, text: Engine) -> None:
    assert text.model_config.architectures == [case.halves.text_model]
    assert not text.model_config.is_multimodal_model
