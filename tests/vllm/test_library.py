"""Prompts of ``retinue.decoders.vllm`` in a real engine, with the demo's model and its pictures."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    RepetitionPenaltyLogitsProcessor,
)
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs

from retinue.decoders.transformers import GenerationOptions, TransformersDecoder
from retinue.decoders.vllm import EngineModel
from retinue.demo.encoder import CHECKPOINT, DigitsEncoder
from retinue.demo.prompt import IMAGE_PAD, QUESTION
from retinue.demo.run import Picture, pictures
from retinue.encoder import AsyncVisionEncoder
from retinue.errors import EncoderFailed, InvalidInput

from .conftest import Engine

IMAGE = 3  # IMAGE_PAD's
WIDTH = 128
SHORT = SamplingParams(temperature=0, max_tokens=8)
LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="session")
def model(engine: Engine) -> EngineModel:
    return EngineModel.of(engine.model_config)


@pytest.fixture(scope="session")
def album() -> list[Picture]:
    return pictures()


@pytest.fixture
async def artifacts(album: list[Picture]) -> list[Tensor]:
    """What the demo's encoder makes of each picture of the album."""
    async with AsyncVisionEncoder(DigitsEncoder(), "demo") as encoder:
        return await encoder.encode([picture.data for picture in album])


def question(images: int, placeholder_id: int = IMAGE) -> list[int]:
    """The ids of a chat that asks what so many images spell."""
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    content = "\n".join([*[IMAGE_PAD] * images, QUESTION])
    ids: list[int] = tokenizer.encode(f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n")
    return [placeholder_id if token_id == IMAGE else token_id for token_id in ids]


def said(engine: Engine, prompt: Any, params: SamplingParams = SHORT) -> list[int]:
    """The tokens that the engine continues ``prompt`` with."""
    return list(engine.finish(engine.add(prompt, params)).outputs[0].token_ids)


def some_rows(rows: int = 12) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))


# ---- answers


async def test_the_engine_says_token_for_token_what_the_embedded_decoder_says(
    engine: Engine, model: EngineModel, album: list[Picture], artifacts: list[Tensor]
) -> None:
    rng = random.Random(42)
    asked = [rng.sample(range(len(album)), rng.randint(1, 4)) for _ in range(24)]
    running = [
        engine.add(model.prompt(question(len(places)), IMAGE, [artifacts[n] for n in places]), SHORT)
        for places in asked
    ]
    together = [list(engine.finish(name).outputs[0].token_ids) for name in running]
    async with TransformersDecoder(CHECKPOINT, dtype="float32", device="cpu") as decoder:
        for places, tokens in zip(asked, together, strict=True):
            parts = [{"type": "prompt_embeds", "data": artifacts[n]} for n in places]
            content = [*parts, {"type": "text", "text": QUESTION}]
            prompt = decoder.chat_prompt([{"role": "user", "content": content}])
            generation = await decoder.generate(prompt, GenerationOptions(max_new_tokens=8))
            assert tokens == generation.token_ids


def test_a_4_and_a_2_spell_42(
    engine: Engine, model: EngineModel, album: list[Picture], artifacts: list[Tensor]
) -> None:
    digits = [picture.digit for picture in album]
    shown = [artifacts[digits.index("4")], artifacts[digits.index("2")]]
    output = engine.finish(engine.add(model.prompt(question(2), IMAGE, shown), SHORT))
    assert output.outputs[0].text == "42"


def test_text_without_images_is_answered_too(engine: Engine, model: EngineModel) -> None:
    ids = question(0)
    assert said(engine, model.prompt(ids, IMAGE, [])) == said(engine, {"prompt_token_ids": ids})


def test_a_marker_that_is_no_token_changes_nothing(engine: Engine, model: EngineModel) -> None:
    expected = said(engine, model.prompt(question(1), IMAGE, [some_rows()]))
    assert said(engine, model.prompt(question(1, -1), -1, [some_rows()])) == expected
    assert said(engine, model.prompt(question(1, 10**6), 10**6, [some_rows()])) == expected


# ---- artifacts of every kind (FC-30)

CONVERTED: dict[str, Callable[[Tensor], Any]] = {
    "float64": lambda rows: rows.double(),
    "requires grad": lambda rows: rows.clone().requires_grad_(),
    "not contiguous": lambda rows: rows.t().contiguous().t(),
    "inference mode": torch.inference_mode()(lambda rows: rows.clone()),
    "lists of floats": lambda rows: rows.tolist(),
}


@pytest.mark.parametrize("convert", CONVERTED.values(), ids=CONVERTED.keys())
def test_a_convertible_artifact_is_as_good_as_a_plain_one(
    engine: Engine, model: EngineModel, convert: Callable[[Tensor], Any]
) -> None:
    expected = said(engine, model.prompt(question(1), IMAGE, [some_rows()]))
    assert said(engine, model.prompt(question(1), IMAGE, [convert(some_rows())])) == expected


BAD: dict[str, Callable[[], Any]] = {
    "half as wide": lambda: torch.ones(12, WIDTH // 2),
    "1-D": lambda: torch.ones(WIDTH),
    "3-D": lambda: torch.ones(1, 12, WIDTH),
    "no rows": lambda: torch.ones(0, WIDTH),
    "integers": lambda: torch.ones(12, WIDTH, dtype=torch.int64),
    "NaN": lambda: some_rows().index_fill(0, torch.tensor([5]), float("nan")),
    "infinity": lambda: some_rows().index_fill(0, torch.tensor([5]), float("inf")),
    "both infinities": lambda: torch.tensor([[float("inf"), float("-inf")] * (WIDTH // 2)]),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_a_bad_artifact_never_reaches_the_engine_and_harms_nobody(
    engine: Engine, model: EngineModel, bad: Callable[[], Any]
) -> None:
    good = model.prompt(question(2), IMAGE, [some_rows(9), some_rows(20)])
    expected = said(engine, good, LONG)
    beside = engine.add(good, LONG)
    engine.step(3)
    with pytest.raises(EncoderFailed, match=r"^image 2 of 2: its artifact has "):
        model.prompt(question(2), IMAGE, [some_rows(), bad()])
    assert engine.unfinished == 1
    assert list(engine.finish(beside).outputs[0].token_ids) == expected
    assert said(engine, good, LONG) == expected


# ---- limits


def test_the_longest_prompt_that_is_let_through_is_the_longest_that_the_engine_takes(
    engine: Engine, model: EngineModel
) -> None:
    rows = 512 - len(question(1))
    longest = model.prompt(question(1), IMAGE, [some_rows(rows)])
    assert len(said(engine, longest, LONG)) == 1
    with pytest.raises(InvalidInput, match="has 512 tokens"):
        model.prompt(question(1), IMAGE, [some_rows(rows + 1)])


def test_the_model_is_read_from_a_real_engine(model: EngineModel) -> None:
    expected = EngineModel(hidden_size=WIDTH, context=512, vocab_size=384, dtype=torch.float32)
    assert model == expected
    assert EngineModel.of(AutoConfig.from_pretrained(CHECKPOINT, dtype="float32")) == expected


def test_an_engine_that_takes_no_embeddings_is_refused() -> None:
    config = EngineArgs(model=str(CHECKPOINT)).create_model_config()
    with pytest.raises(ValueError, match="give it enable_prompt_embeds=True"):
        EngineModel.of(config)


# ---- what else an engine does with a prompt


def test_the_prefix_cache_tells_pictures_apart_and_knows_them_again(
    engine: Engine, model: EngineModel, album: list[Picture], artifacts: list[Tensor]
) -> None:
    places = sorted(range(len(album)), key=lambda n: len(artifacts[n]))
    alike = max((list(group) for _, group in groupby(places, lambda n: len(artifacts[n]))), key=len)
    shown = [artifacts[n] for n in alike]
    orders = [[0, 1, 2, 3], [1, 0, 3, 2], [3, 2, 1, 0]]
    prompts = [model.prompt(question(4), IMAGE, [shown[n] for n in order]) for order in orders]
    assert len({str(prompt["prompt_token_ids"]) for prompt in prompts}) == 1  # only the rows differ
    for _ in range(2):
        outputs = [engine.finish(engine.add(prompt, SHORT)) for prompt in prompts]
        assert [output.outputs[0].text for output in outputs] == [
            "".join(album[alike[n]].digit for n in order) for order in orders
        ]
    assert all(output.num_cached_tokens for output in outputs)


@pytest.mark.parametrize("placeholder_id", [IMAGE, -1])
def test_a_repetition_penalty_sees_the_prompts_text_and_no_image(
    engine: Engine, model: EngineModel, artifacts: list[Tensor], placeholder_id: int
) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, repetition_penalty=30.0)
    prompt = model.prompt(question(2, placeholder_id), placeholder_id, artifacts[:2])
    beside = engine.add(prompt, LONG)
    tokens = said(engine, prompt, params)
    assert tokens == with_penalty(prompt, params)
    assert tokens != said(engine, prompt, LONG)[:12]
    assert list(engine.finish(beside).outputs[0].token_ids) == said(engine, prompt, LONG)


@torch.inference_mode()
def with_penalty(prompt: Any, params: SamplingParams) -> list[int]:
    """What transformers makes of ``prompt``, one token at a time."""
    language: Any = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype="float32")
    penalize = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
    table = language.get_input_embeddings()
    ids = torch.tensor(prompt["prompt_token_ids"])
    is_text = torch.tensor(prompt["prompt_is_token_ids"])
    embeds = torch.where(is_text[:, None], table(ids), prompt["prompt_embeds"])
    written: list[int] = []
    for _ in range(params.max_tokens or 0):
        logits = language(inputs_embeds=embeds[None]).logits[:, -1]
        seen = torch.cat([ids, torch.tensor(written, dtype=torch.long)])[None]
        written.append(int(penalize(seen, logits).argmax()))
        embeds = torch.cat([embeds, table(torch.tensor(written[-1:]))])
    return written


def test_an_aborted_request_leaves_the_engine_at_once_and_its_neighbour_alone(
    engine: Engine, model: EngineModel
) -> None:
    free = engine.free_blocks
    prompts: Sequence[Any] = [model.prompt(question(1), IMAGE, [some_rows(rows)]) for rows in (150, 160)]
    expected = said(engine, prompts[0], LONG)
    stays, leaves = (engine.add(prompt, LONG) for prompt in prompts)
    engine.step(5)
    assert engine.unfinished == 2
    engine.abort(leaves)
    assert engine.unfinished == 1
    assert list(engine.finish(stays).outputs[0].token_ids) == expected
    assert engine.free_blocks == free
