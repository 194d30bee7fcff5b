"""Whole vision-language models of each family, tiny and random, made from configuration alone.

Their weights are wide, so that what is in a picture decides what is said about it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2Tokenizer

SPECIAL = [
    "<|end|>",
    "<|start|>",
    "<image>",
    "<video>",
    "<img>",
    "</img>",
    "[IMG]",
    "[IMG_BREAK]",
    "[IMG_END]",
]
TAGS = ["<global-img>", *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5))]
IDEFICS = ["<fake_token_around_image>", "<end_of_utterance>"]
TEMPLATE = (
    "{%% for message in messages %%}<|start|>{{ message['role'] }}\n"
    "{%% for part in message['content'] %%}"
    "{%% if part['type'] == 'image' %%}%s{%% else %%}{{ part['text'] }}{%% endif %%}"
    "{%% endfor %%}<|end|>\n{%% endfor %%}"
    "{%% if add_generation_prompt %%}<|start|>assistant\n{%% endif %%}"
)
END_ID = 0
HIDDEN = 64
NEW_TOKENS = 12

TEXT: Mapping[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": END_ID,
    "pad_token_id": END_ID,
}
VISION: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


@dataclass(frozen=True, eq=False)
class Whole:
    """A vision-language model as transformers runs it: the reference.

    ``placeholder`` stands for an image in its prompts.
    """

    name: str
    folder: Path
    model: Any
    processor: Any
    placeholder: str

    def prompt(self, pictures: int) -> str:
        """A prompt about so many pictures, with text before, between and after them."""
        images = " and ".join([self.placeholder] * pictures)
        return f"<|start|>user\nlook at {images}\nwhat is on it?<|end|>\n<|start|>assistant\n"

    @torch.inference_mode()
    def answer(self, pictures: Sequence[PIL.Image.Image]) -> tuple[list[int], Tensor]:
        """The greedy tokens, and the input embeddings that the language model saw, (length, hidden)."""
        seen: list[Tensor] = []
        decoder = self.model.model.get_decoder()

        def look(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.append(kwargs["inputs_embeds"][0].clone())

        hook = decoder.register_forward_pre_hook(look, with_kwargs=True)
        inputs = self.processor(images=list(pictures), text=self.prompt(len(pictures)), return_tensors="pt")
        out = self.model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        hook.remove()
        return out[0, inputs["input_ids"].shape[1] :].tolist(), seen[0]


def picture(width: int, height: int, seed: int = 0) -> PIL.Image.Image:
    """Noise in blocks of its own: no two seeds look alike, at any scale."""
    rng = np.random.default_rng(seed)
    blocks = PIL.Image.fromarray(rng.integers(0, 256, (6, 6, 3), np.uint8))
    return blocks.resize((width, height), PIL.Image.Resampling.NEAREST)


# ---- the parts


def tokenizer(
    special: Sequence[str], *, template: str | None = None, qwen: bool = False, **names: str
) -> PreTrainedTokenizerBase:
    """Bytes and a few words; ``qwen``: as transformers reads any tokenizer beside a qwen2 model."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(special) + 24,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(
        ["look at what is on it, and on this, the user and the assistant"] * 9, trainer
    )
    options: dict[str, Any] = {
        "eos_token": "<|end|>",
        "pad_token": "<|end|>",
        "extra_special_tokens": names,
        "chat_template": template,
    }
    if not qwen:
        return PreTrainedTokenizerFast(tokenizer_object=trained, **options)
    model = json.loads(trained.to_str())["model"]
    merges: Any = [tuple(pair) for pair in model["merges"]]
    words = Qwen2Tokenizer(vocab=model["vocab"], merges=merges, **options)
    words.add_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special], special_tokens=True
    )
    return words


def text_config(kind: str, vocab_size: int, **more: Any) -> Any:
    return transformers.AutoConfig.for_model(kind, **TEXT, vocab_size=vocab_size, **more)


def vision_config(kind: str, **more: Any) -> Any:
    return transformers.AutoConfig.for_model(kind, **VISION, **more)


def processor_class(module: str, name: str) -> Any:
    """The family's processor, for images and text alone.

    Without torchvision there is no video processor, and Pixtral's module asks its image processor's
    torchvision variant for a function that the Pillow variant has as well.
    """
    package = f"transformers.models.{module}"
    if module == "pixtral" and importlib.util.find_spec("torchvision") is None:
        pillow = importlib.import_module(f"{package}.image_processing_pil_pixtral")
        sys.modules.setdefault(f"{package}.image_processing_pixtral", pillow)
    whole = getattr(importlib.import_module(f"{package}.processing_{module}"), name)
    return type(name, (whole,), {"get_attributes": classmethod(lambda cls: ["image_processor", "tokenizer"])})


def image_processor(name: str, **options: Any) -> Any:
    return getattr(transformers, f"{name}ImageProcessorPil")(**options)


def randomise(model: PreTrainedModel) -> None:
    """Weights that keep signals about as wide as they are, with embeddings far from each other."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or "lambda" in name:
                continue
            width = weight[0].numel() if weight.ndim > 1 else 1
            std = 1.0 if "embed_tokens" in name else 1.5 / width**0.5 if weight.ndim > 1 else 0.1
            weight.copy_(torch.randn(weight.shape, generator=generator) * std)
        model.get_output_embeddings().weight[END_ID] = 0  # no answer ends early


def finish(folder: Path, name: str, kind: str, config: Any, processor: Any, placeholder: str) -> Whole:
    torch.manual_seed(0)
    config.image_token_id = processor.tokenizer.convert_tokens_to_ids(placeholder)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    randomise(model)
    model.train(False)
    model.generation_config.eos_token_id = END_ID
    model.generation_config.pad_token_id = END_ID
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return Whole(name, folder, model, processor, placeholder)


# ---- the families


def llava(folder: Path) -> Whole:
    """As LLaVA 1.5: CLIP without its class token, one square."""
    words = tokenizer(SPECIAL, template=TEMPLATE % "<image>")
    size = {"height": 24, "width": 24}
    processor = processor_class("llava", "LlavaProcessor")(
        image_processor("CLIP", size={"shortest_edge": 24}, crop_size=size),
        words,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=words.chat_template,
    )
    config = transformers.LlavaConfig(
        vision_config=vision_config("clip_vision_model", image_size=24, patch_size=8),
        text_config=text_config("llama", len(words)),
    )
    return finish(folder, "llava", "Llava", config, processor, "<image>")


def llava_siglip(folder: Path) -> Whole:
    """A LLaVA with a tower that has no class token, and two of its layers."""
    words = tokenizer(SPECIAL, template=TEMPLATE % "<image>", qwen=True)
    processor = processor_class("llava", "LlavaProcessor")(
        image_processor("Siglip", size={"height": 24, "width": 24}),
        words,
        patch_size=8,
        vision_feature_select_strategy="full",
    )
    config = transformers.LlavaConfig(
        vision_config=vision_config(
            "siglip_vision_model", image_size=24, patch_size=8, vision_use_head=False
        ),
        text_config=text_config("qwen2", len(words)),
        vision_feature_select_strategy="full",
        vision_feature_layer=[-2, -1],
    )
    return finish(folder, "llava_siglip", "Llava", config, processor, "<image>")


def llava_pixtral(folder: Path) -> Whole:
    """As Pixtral 12B: any shape, a break token after each line."""
    words = tokenizer(SPECIAL, template=TEMPLATE % "[IMG]")
    processor = processor_class("pixtral", "PixtralProcessor")(
        image_processor("Pixtral", size={"longest_edge": 64}, patch_size={"height": 8, "width": 8}),
        words,
        patch_size=8,
    )
    config = transformers.LlavaConfig(
        vision_config=vision_config("pixtral", image_size=64, patch_size=8, head_dim=16),
        text_config=text_config("mistral", len(words)),
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    )
    return finish(folder, "llava_pixtral", "Llava", config, processor, "[IMG]")


def mistral3(folder: Path) -> Whole:
    """As Mistral Small 3.1: a Pixtral tower whose patches are merged by four."""
    words = tokenizer(SPECIAL, template=TEMPLATE % "[IMG]")
    processor = processor_class("pixtral", "PixtralProcessor")(
        image_processor("Pixtral", size={"longest_edge": 64}, patch_size={"height": 4, "width": 4}),
        words,
        patch_size=4,
        spatial_merge_size=2,
    )
    config = transformers.Mistral3Config(
        vision_config=vision_config("pixtral", image_size=64, patch_size=4, head_dim=16),
        text_config=text_config("mistral", len(words), head_dim=32),
        spatial_merge_size=2,
        tie_word_embeddings=False,
    )
    return finish(folder, "mistral3", "Mistral3", config, processor, "[IMG]")


def llava_onevision(folder: Path) -> Whole:
    words = tokenizer(SPECIAL, template=TEMPLATE % "<image>", qwen=True)
    grids = [[24 * rows, 24 * columns] for rows in range(1, 4) for columns in range(1, 4)]
    processor = processor_class("llava_onevision", "LlavaOnevisionProcessor")(
        image_processor("LlavaOnevision", size={"height": 24, "width": 24}, image_grid_pinpoints=grids),
        words,
        num_image_tokens=9,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_4",
    )
    config = transformers.LlavaOnevisionConfig(
        vision_config=vision_config(
            "siglip_vision_model", image_size=24, patch_size=8, vision_use_head=False
        ),
        text_config=text_config("qwen2", len(words)),
        image_grid_pinpoints=grids,
        vision_aspect_ratio="anyres_max_4",
        video_token_index=SPECIAL.index("<video>"),
    )
    return finish(folder, "llava_onevision", "LlavaOnevision", config, processor, "<image>")


def internvl(folder: Path) -> Whole:
    words = tokenizer(
        SPECIAL,
        template=TEMPLATE % "<image>",
        qwen=True,
        start_image_token="<img>",
        end_image_token="</img>",
        context_image_token="<image>",
        video_token="<video>",
    )
    processor = processor_class("internvl", "InternVLProcessor")(
        image_processor("GotOcr2", size={"height": 16, "width": 16}, max_patches=6), words, image_seq_length=4
    )
    config = transformers.InternVLConfig(
        vision_config=vision_config(
            "internvl_vision", image_size=[16, 16], patch_size=[4, 4], use_mean_pooling=False
        ),
        text_config=text_config("qwen2", len(words)),
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    return finish(folder, "internvl", "InternVL", config, processor, "<image>")


def idefics3(folder: Path) -> Whole:
    """Its tags are ordinary text, of several tokens each, as in Idefics3 8B."""
    words = tokenizer([*SPECIAL, *IDEFICS], template=TEMPLATE % "<image>")
    return _idefics(folder, "Idefics3", words)


def smolvlm(folder: Path) -> Whole:
    """Its tags are tokens."""
    words = tokenizer([*SPECIAL, *IDEFICS, *TAGS], template=TEMPLATE % "<image>")
    return _idefics(folder, "SmolVLM", words, tie_word_embeddings=True)


def _idefics(folder: Path, kind: str, words: PreTrainedTokenizerBase, **more: Any) -> Whole:
    module = kind.lower()
    images = image_processor(kind, size={"longest_edge": 48}, max_image_size={"longest_edge": 16})
    extra: list[Any] = [] if kind == "Idefics3" else [None]  # no video processor
    processor = processor_class(module, f"{kind}Processor")(images, words, *extra, image_seq_len=4)
    config = getattr(transformers, f"{kind}Config")(
        vision_config={**VISION, "model_type": f"{module}_vision", "image_size": 16, "patch_size": 4},
        text_config=text_config("llama", len(words), **more).to_dict(),
        scale_factor=2,
        pad_token_id=END_ID,
        **more,
    )
    return finish(folder, module, kind, config, processor, "<image>")


FAMILIES: Mapping[str, Callable[[Path], Whole]] = {
    make.__name__: make
    for make in (
        idefics3,
        internvl,
        llava,
        llava_onevision,
        llava_pixtral,
        llava_siglip,
        mistral3,
        smolvlm,
    )
}
