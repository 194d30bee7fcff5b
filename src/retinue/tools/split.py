"""``retinue split``: a vision-language model becomes a text model and an encoder.

The text model is an ordinary checkpoint that any server of text models loads: the language model with its
whole vocabulary, so that every token keeps its id. The encoder is a checkpoint of the family's own class in
which a language model without layers stands for the real one; the stand-in's vocabulary is the tokens that
the family puts around an image's rows.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    LlamaConfig,
    LlamaModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.processing_utils import ProcessorMixin

from retinue.encoders.families import Family, family_of
from retinue.encoders.hf import SPANS_FILE
from retinue.errors import InvalidInput

__all__ = ["Split", "split"]

# Content becomes one string: parts, whose embeddings are marks in text by then, are joined by newlines, as
# vLLM joins them for templates that take strings. So a prompt is the same whoever has joined them.
_PRELUDE = (
    "{%- set split = namespace(messages=[]) -%}"
    "{%- for message in messages -%}"
    "{%- set content = message['content'] if message['content'] is string"
    r" else message['content'] | map(attribute='text') | join('\n') -%}"
    "{%- set parts = [{'type': 'text', 'text': content}] -%}"
    "{%- set content = parts if message['role'] in <roles> else content -%}"
    "{%- set split.messages = split.messages + [dict(message, content=content)] -%}"
    "{%- endfor -%}"
    "{% set messages = split.messages %}"
)
# From the most that a template may take to the least.
_CONVERSATIONS = (("system", "user", "assistant", "user"), ("user", "assistant", "user"), ("user",))

# Tokenizers differ in how they cut spaces, digits, contractions, newlines and what is not Latin.
_PROBE = "It's 1234  o'clock,\n\n\tin \u6771\u4eac and Orl\u00e9ans: DON'T."


@dataclass(frozen=True, kw_only=True)
class Split:
    """What ``split`` wrote.

    ``family``: the model's ``model_type``. ``text``, ``encoder``: the folders. ``text_model``: the text
    model's class. ``hidden_size``: of an embedding. ``has_chat_template``: False where the model has none
    that a text can pass through; its prompts are then token ids.
    """

    family: str
    text: Path
    encoder: Path
    text_model: str
    hidden_size: int
    has_chat_template: bool

    @property
    def summary(self) -> str:
        """What a person wants to know next."""
        lines = [
            f"{self.text}: {self.text_model}, hidden size {self.hidden_size}",
            f"{self.encoder}: the encoder of a {self.family} model",
            f"retinue serve {self.text} --encoder retinue.encoders.hf:HFVisionEncoder "
            f"--encoder-model {self.encoder}",
        ]
        if not self.has_chat_template:
            lines.append("the model has no chat template that text passes through: send token ids")
        return "\n".join(lines)


def split(model: str | os.PathLike[str], out: str | os.PathLike[str]) -> Split:
    """Write the halves of ``model``, a folder or a Hub name, to ``out``/text and ``out``/encoder.

    It is loaded whole, on the CPU, in the checkpoint's dtype; its own code is never run. ``out`` must not
    exist, or be empty; it appears when all is written, or not at all.

    ``InvalidInput``: a model that cannot be taken apart, named with the reason, or ``out`` is in use.
    ``OSError`` and whatever else transformers raises for a model that cannot be loaded come through.
    """
    model, out = os.fspath(model), Path(out)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise InvalidInput(f"{out} exists and is not an empty folder")
    family = _family(model)
    settings, _ = ProcessorMixin.get_processor_dict(model)
    if settings.get("processor_class", family.processor) != family.processor:
        raise InvalidInput(
            f"the processor of {model} is a {settings['processor_class']}, not a {family.processor}: "
            "how it lays out an image is not known"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as unfinished:
        halves = _write(model, family, settings, Path(unfinished) / "halves")
        if out.exists():
            out.rmdir()
        shutil.move(Path(unfinished) / "halves", out)
    return Split(family=family.config.model_type, text=out / "text", encoder=out / "encoder", **halves)


def _family(model: str) -> Family:
    """The family; refuses a language model that is more than a text model before any weights are read."""
    config = AutoConfig.from_pretrained(model)
    family = family_of(config)
    text = config.get_text_config()
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InvalidInput(f"the language model of {model}, {text.model_type}, is no causal one")
    if "mrope_section" in (getattr(text, "rope_parameters", None) or {}):
        raise InvalidInput(
            f"the language model of {model} has positions of several axes (M-RoPE), "
            "and rows in a prompt have one"
        )
    return family


def _write(model: str, family: Family, settings: Mapping[str, Any], out: Path) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    image_processor = AutoImageProcessor.from_pretrained(model)
    whole: Any = AutoModelForImageTextToText.from_pretrained(model, dtype="auto")
    pieces = _token_ids(family, tokenizer, settings, image_processor)
    tokenizer.chat_template = _text_template(tokenizer, settings.get("chat_template"))
    text_model = _write_text(whole, getattr(whole.model, family.language_model), out / "text")
    tokenizer.save_pretrained(out / "text")
    _check_tokenizer(tokenizer, out / "text")
    _write_encoder(whole.model, family, pieces, out / "encoder")
    image_processor.save_pretrained(out / "encoder")
    return {
        "text_model": text_model,
        "hidden_size": whole.get_output_embeddings().weight.shape[1],
        "has_chat_template": tokenizer.chat_template is not None,
    }


def _write_text(whole: Any, language_model: Any, folder: Path) -> str:
    head = whole.get_output_embeddings()
    config = language_model.config
    config.tie_word_embeddings = head.weight is language_model.get_input_embeddings().weight
    with torch.device("meta"):  # its weights are those that are there already
        text: Any = AutoModelForCausalLM.from_config(config, dtype=head.weight.dtype)
    setattr(text, text.base_model_prefix, language_model)
    text.set_output_embeddings(head)
    text.generation_config = whole.generation_config
    text.save_pretrained(folder)
    return type(text).__name__


def _write_encoder(model: Any, family: Family, pieces: Mapping[str, list[int]], folder: Path) -> None:
    language_model = getattr(model, family.language_model)
    table = sorted({token_id for ids in pieces.values() for token_id in ids}) or [0]
    embeddings = language_model.get_input_embeddings()(torch.tensor(table)).detach()  # (table, hidden)
    epsilon = getattr(language_model.config, "rms_norm_eps", 1e-6)  # Mistral3's projector reads it here
    stand_in = LlamaModel(
        LlamaConfig(
            vocab_size=len(table),
            hidden_size=embeddings.shape[1],
            num_hidden_layers=0,
            num_attention_heads=1,
            num_key_value_heads=1,
            intermediate_size=1,
            rms_norm_eps=epsilon,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).to(embeddings.dtype)
    stand_in.embed_tokens.weight.data.copy_(embeddings)
    setattr(model, family.language_model, stand_in)
    model.config.text_config = stand_in.config
    model.save_pretrained(folder)
    places = {name: [table.index(token_id) for token_id in ids] for name, ids in pieces.items()}
    (folder / SPANS_FILE).write_text(json.dumps(places, indent=1) + "\n")


def _token_ids(
    family: Family, tokenizer: Any, settings: Mapping[str, Any], image_processor: Any
) -> dict[str, list[int]]:
    """Tokenize each piece as it stands in a prompt: between rows, whose place is the image token's."""
    image_id = family.config.image_token_id
    image_token = tokenizer.convert_ids_to_tokens(image_id)
    pieces = {}
    for name, piece in family.spell(tokenizer, settings, image_processor).items():
        first, *ids, last = tokenizer(image_token + piece + image_token, add_special_tokens=False)[
            "input_ids"
        ]
        if not first == last == image_id:
            raise InvalidInput(f"its tokenizer does not keep the image token {image_token!r} apart")
        pieces[name] = ids
    return pieces


def _check_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Refuse a tokenizer of which transformers makes another beside the text model, as it does for qwen2."""
    read = AutoTokenizer.from_pretrained(folder)
    if read.get_vocab() != tokenizer.get_vocab() or read(_PROBE).input_ids != tokenizer(_PROBE).input_ids:
        raise InvalidInput(
            f"beside the text model, its {type(tokenizer).__name__} would be read as a "
            f"{type(read).__name__}, which makes other tokens"
        )


def _text_template(tokenizer: Any, template: Any) -> str | None:
    """The model's chat template for messages whose content is text, as a string or in parts; or None.

    Some templates take strings, some parts, and some the one from users and the other from assistants. The
    fewest in parts are tried first: what takes only strings may print a list of parts as Python writes it.
    """
    if isinstance(template, Mapping):
        template = template.get("default")
    template = template or tokenizer.chat_template
    if not isinstance(template, str):
        return None
    for conversation in _CONVERSATIONS:
        roles = sorted(set(conversation))
        for count in range(len(roles) + 1):
            for in_parts in itertools.combinations(roles, count):
                whole = _PRELUDE.replace("<roles>", str(list(in_parts))) + template
                if _passes_text(tokenizer, whole, conversation):
                    return whole
    return None


def _passes_text(tokenizer: Any, template: str, conversation: Sequence[str]) -> bool:
    """Whether a conversation is neither refused nor loses a text."""
    words = [f"Retinue {n}" for n in range(len(conversation))]
    messages = [{"role": role, "content": word} for role, word in zip(conversation, words, strict=True)]
    try:
        rendered = tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True
        )
    except (TemplateError, TypeError):
        return False
    return all(word in rendered for word in words)
