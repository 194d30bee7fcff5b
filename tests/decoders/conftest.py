"""Small models and tokenizers, made here: random weights, but logits wide enough for clear choices."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from retinue.decoders.model import TextModel

SPECIAL = ["<|end|>", "<|start|>", "<|image|>"]
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
WORDS = "the user and the assistant look at an image of a cat on the mat, and say what the cat is called"


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS], trainer)
    return _finished(tokenizer)


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """As of a Llama 2: a space is a character of the tokens, and the first token of a text gets one."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    trained.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first"), decoders.Fuse()]
    )
    trainer = trainers.BpeTrainer(vocab_size=64, special_tokens=["<unk>", *SPECIAL], show_progress=False)
    trained.train_from_iterator([WORDS], trainer)
    parts = json.loads(trained.to_str())
    vocab = parts["model"]["vocab"]
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}  # ordinary tokens, not special
    parts["model"]["byte_fallback"] = True
    return _finished(Tokenizer.from_str(json.dumps(parts)))


def _finished(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>", chat_template=TEMPLATE
    )


def tiny_model(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 330,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "eos_token_id": 0,
    }
    model: PreTrainedModel
    if family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**sizes))
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    model.train(False)
    return model


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """For models so small, a second thread only waits: 15 times slower when the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_level_tokenizer()


@pytest.fixture(scope="session", params=["byte level", "sentencepiece"])
def any_tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return byte_level_tokenizer() if request.param == "byte level" else sentencepiece_tokenizer()


@pytest.fixture(scope="session")
def decode(tokenizer: PreTrainedTokenizerFast) -> Callable[[list[int]], str]:
    return lambda token_ids: str(tokenizer.decode(token_ids, skip_special_tokens=True))


@pytest.fixture(scope="session", params=["qwen2", "llama"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_model(request.param)


@pytest.fixture
def text_model(model: PreTrainedModel) -> TextModel:
    return TextModel(model)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_model("qwen2").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
