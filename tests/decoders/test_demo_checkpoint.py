"""The decoder over the demo's language model, which is trained: its choices are clear ones."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import retinue.demo
from retinue.decoders.transformers import GenerationOptions, TransformersDecoder
from retinue.prompt.tensors import Prompt

CHECKPOINT = Path(str(retinue.demo.__file__)).parent / "checkpoint"
QUESTIONS = ["What number do the images spell?", "How many images are there?", "Which digit is the largest?"]


def messages(question: str, images: int, width: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(images)
    parts: list[dict[str, Any]] = [
        {"type": "prompt_embeds", "data": torch.randn(4 + 3 * n, width, generator=generator)}
        for n in range(images)
    ]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]


async def test_concurrent_prompts_get_token_for_token_what_transformers_generates() -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype="float32")
    embeddings = model.get_input_embeddings()

    def reference(prompt: Prompt) -> list[int]:
        is_text = torch.tensor(prompt.is_token_ids)
        with torch.inference_mode():
            embeds = embeddings(torch.tensor(prompt.token_ids).where(is_text, 0))
            embeds[~is_text] = prompt.embeds[~is_text]
        mask = torch.ones(1, len(embeds), dtype=torch.long)
        generated = model.generate(
            inputs_embeds=embeds[None], attention_mask=mask, do_sample=False, max_new_tokens=16
        )
        tokens: list[int] = generated[0].tolist()
        return tokens

    async with TransformersDecoder(CHECKPOINT, dtype="float32", device="cpu") as decoder:
        width = embeddings.weight.shape[1]
        prompts = [
            decoder.chat_prompt(messages(question, images, width))
            for images in range(5)
            for question in QUESTIONS
        ]
        options = GenerationOptions(max_new_tokens=16)
        written = await asyncio.gather(*(decoder.generate(prompt, options) for prompt in prompts))
    assert [generation.token_ids for generation in written] == [reference(prompt) for prompt in prompts]


async def test_text_chats_become_the_ids_of_the_tokenizers_own_template() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(CHECKPOINT)
    async with TransformersDecoder(CHECKPOINT, device="cpu") as decoder:
        for question in QUESTIONS:
            [message] = messages(question, 0, 0)
            expected = tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
            )
            assert decoder.chat_prompt([message]).token_ids == expected
