"""The embedded decoder as its callers see it: the promises of ``retinue.decoders.transformers``."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers import Qwen2ForCausalLM

from retinue.decoders.transformers import GenerationOptions, TransformersDecoder
from retinue.errors import EncoderFailed, EncoderUnavailable, InvalidInput
from retinue.prompt.tensors import Prompt, splice

IMAGE = 329
TEXT = [3, 50, 60, 70]
LONG = GenerationOptions(max_new_tokens=100)
WARM = GenerationOptions(max_new_tokens=40, temperature=1.0, seed=5)


@pytest.fixture
async def decoder(checkpoint: Path) -> AsyncIterator[TransformersDecoder]:
    async with TransformersDecoder(checkpoint, device="cpu") as decoder:
        yield decoder


def pictured(value: float = 0.5) -> Prompt:
    return splice([3, IMAGE, 60], IMAGE, [torch.full((4, 64), value)], hidden_size=64)


class Gate:
    """Sees every forward of the model, and can hold one."""

    def __init__(self) -> None:
        self.forwards = 0
        self.inside = threading.Event()
        self._open = threading.Event()
        self._held = 0

    def hold(self, forward: int) -> None:
        """Hold the ``forward``-th forward, counted from 1, until ``release``."""
        self._held = forward

    def release(self) -> None:
        self._open.set()

    async def wait_inside(self) -> None:
        await asyncio.to_thread(self.inside.wait)

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        if isinstance(module, Qwen2ForCausalLM):
            self.forwards += 1
            if self.forwards == self._held:
                self.inside.set()
                self._open.wait()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    with register_module_forward_pre_hook(gate):
        yield gate
        gate.release()


# ---- texts


async def test_concurrent_requests_get_what_each_gets_alone(decoder: TransformersDecoder) -> None:
    prompts: list[Prompt | list[int]] = [TEXT, pictured(), TEXT * 5, pictured(-1.0), [9]]
    options = [replace(WARM, seed=n, temperature=n % 2) for n in range(5)]
    alone = [await decoder.generate(p, o) for p, o in zip(prompts, options, strict=True)]
    together = await asyncio.gather(*map(decoder.generate, prompts, options))
    assert together == alone


async def test_requests_that_wait_share_a_batch(decoder: TransformersDecoder, gate: Gate) -> None:
    gate.hold(1)
    one_token = GenerationOptions(max_new_tokens=1)
    first = asyncio.create_task(decoder.generate(TEXT, one_token))
    await gate.wait_inside()
    others = [asyncio.create_task(decoder.generate(TEXT, one_token)) for _ in range(5)]
    await asyncio.sleep(0)  # they submit
    gate.release()
    await asyncio.gather(first, *others)
    assert gate.forwards == 2


async def test_an_images_rows_and_not_its_placeholder_decide_the_text(decoder: TransformersDecoder) -> None:
    same = splice([3, 11, 60], 11, [torch.full((4, 64), 0.5)], hidden_size=64)
    ids_beyond_the_vocabulary = replace(pictured(), token_ids=[3, 9999, 9999, 9999, 9999, 60])
    expected = await decoder.generate(pictured(), WARM)
    assert await decoder.generate(same, WARM) == expected
    assert await decoder.generate(ids_beyond_the_vocabulary, WARM) == expected
    assert await decoder.generate(pictured(-3.0), WARM) != expected


async def test_a_chat_with_an_image_becomes_a_prompt_that_generates(decoder: TransformersDecoder) -> None:
    parts = [{"type": "prompt_embeds", "data": torch.ones(3, 64)}, {"type": "text", "text": "what is it?"}]
    prompt = decoder.chat_prompt([{"role": "user", "content": parts}])
    assert prompt.is_token_ids.count(False) == 3
    generation = await decoder.generate(prompt, GenerationOptions(max_new_tokens=4))
    assert generation.prompt_tokens == len(prompt.token_ids)


# ---- streams


@pytest.mark.parametrize("seed", range(4))
async def test_a_streams_pieces_join_to_the_generated_text(decoder: TransformersDecoder, seed: int) -> None:
    options = replace(WARM, seed=seed)
    whole = await decoder.generate(pictured(), options)
    options = replace(options, stop=(whole.text[8:11],))
    expected = await decoder.generate(pictured(), options)
    stream = decoder.stream(pictured(), options)
    pieces = [piece async for piece in stream]
    assert "".join(pieces) == expected.text
    assert len(pieces) > 1
    assert "" not in pieces
    assert stream.generation == expected


async def test_a_piece_arrives_before_the_text_is_finished(decoder: TransformersDecoder, gate: Gate) -> None:
    gate.hold(10)
    async with decoder.stream(TEXT, WARM) as stream:
        assert await anext(stream)
        with pytest.raises(RuntimeError, match="not finished"):
            _ = stream.generation


async def test_a_stream_refuses_a_bad_prompt_at_once(decoder: TransformersDecoder) -> None:
    with pytest.raises(InvalidInput, match="the prompt is empty"):
        decoder.stream([])


async def test_an_error_of_the_model_comes_out_of_the_stream(decoder: TransformersDecoder) -> None:
    def fail(module: torch.nn.Module, args: Any) -> None:
        raise MemoryError

    with register_module_forward_pre_hook(fail):
        stream = decoder.stream(TEXT, WARM)
        with pytest.raises(EncoderFailed):
            await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    await decoder.generate(TEXT, WARM)  # the decoder goes on


async def test_logits_that_are_not_finite_are_no_text(decoder: TransformersDecoder) -> None:
    def poison(module: torch.nn.Module, args: Any, output: Any) -> None:
        if isinstance(module, Qwen2ForCausalLM):
            output.logits[:] = torch.nan

    with register_module_forward_hook(poison), pytest.raises(EncoderFailed, match="logits are not"):
        await decoder.generate(TEXT, WARM)


# ---- callers who leave


async def test_a_closed_stream_gets_no_further_token(decoder: TransformersDecoder, gate: Gate) -> None:
    gate.hold(5)
    stream = decoder.stream(TEXT, LONG)
    await gate.wait_inside()
    await stream.aclose()
    gate.release()
    await decoder.generate(TEXT, GenerationOptions(max_new_tokens=1))
    assert gate.forwards == 6
    assert [piece async for piece in stream] == []


async def test_a_cancelled_request_gets_no_further_token(decoder: TransformersDecoder, gate: Gate) -> None:
    gate.hold(5)
    request = asyncio.create_task(decoder.generate(TEXT, LONG))
    await gate.wait_inside()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    gate.release()
    await decoder.generate(TEXT, GenerationOptions(max_new_tokens=1))
    assert gate.forwards == 6


async def test_a_stream_whose_reader_is_cancelled_gets_no_further_token(
    decoder: TransformersDecoder, gate: Gate
) -> None:
    gate.hold(1)
    stream = decoder.stream(TEXT, LONG)
    reader = asyncio.ensure_future(anext(stream))
    await gate.wait_inside()
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    await asyncio.sleep(0)  # the request hears of it
    gate.release()
    await decoder.generate(TEXT, GenerationOptions(max_new_tokens=1))
    assert gate.forwards == 2
    assert [piece async for piece in stream] == []


async def test_a_dropped_stream_gets_no_further_token(decoder: TransformersDecoder, gate: Gate) -> None:
    gate.hold(5)
    stream = decoder.stream(TEXT, LONG)
    await gate.wait_inside()
    del stream
    gc.collect()
    gate.release()
    await decoder.generate(TEXT, GenerationOptions(max_new_tokens=1))
    assert gate.forwards == 6


async def test_a_request_that_left_the_queue_never_reaches_the_model(
    decoder: TransformersDecoder, gate: Gate
) -> None:
    gate.hold(1)
    first = asyncio.create_task(decoder.generate(TEXT, GenerationOptions(max_new_tokens=1)))
    await gate.wait_inside()
    async with decoder.stream(TEXT, LONG):
        await asyncio.sleep(0)  # it is submitted
    gate.release()
    await first
    await decoder.generate(TEXT, GenerationOptions(max_new_tokens=1))
    assert gate.forwards == 2


# ---- prompts that are refused


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], WARM, "the prompt is empty"),
        (TEXT * 10, GenerationOptions(max_new_tokens=89), "40 tokens and max_new_tokens=89 make 129, .* 128"),
        ([3, 330], WARM, "prompt token 1 is 330, outside the vocabulary of 330"),
        ([-1, 3], WARM, "prompt token 0 is -1, outside the vocabulary of 330"),
        (replace(pictured(), is_token_ids=[True]), WARM, "6 token ids and 1 is_token_ids"),
    ],
)
async def test_a_bad_prompt_is_the_callers_fault_and_names_value_and_bound(
    decoder: TransformersDecoder, prompt: Prompt | list[int], options: GenerationOptions, message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        await decoder.generate(prompt, options)


@pytest.mark.parametrize(
    ("embeds", "message"),
    [
        (torch.zeros(6, 32), r"shape \(6, 32\), not \(6, 64\)"),
        (torch.zeros(5, 64), r"shape \(5, 64\), not \(6, 64\)"),
        (torch.full((6, 64), torch.nan), "not all finite"),
    ],
)
async def test_bad_embeddings_are_the_encoders_fault(
    decoder: TransformersDecoder, embeds: torch.Tensor, message: str
) -> None:
    with pytest.raises(EncoderFailed, match=message):
        await decoder.generate(replace(pictured(), embeds=embeds), WARM)


async def test_it_tells_the_width_of_its_rows_and_the_length_of_its_context(
    decoder: TransformersDecoder,
) -> None:
    assert (decoder.width, decoder.context) == (64, 128)


async def test_a_text_beyond_the_context_is_refused_before_it_takes_memory(
    decoder: TransformersDecoder,
) -> None:
    with pytest.raises(
        InvalidInput, match=r"text alone has \d+ tokens, more than the model's context of 128"
    ):
        decoder.chat_prompt([{"role": "user", "content": "word " * 100_000}])


async def test_a_prompt_may_fill_the_context_to_its_end(decoder: TransformersDecoder) -> None:
    generation = await decoder.generate(
        TEXT * 10, GenerationOptions(max_new_tokens=88, temperature=1.0, seed=2)
    )
    assert generation.prompt_tokens == 40


# ---- life


async def test_before_and_after_its_life_the_decoder_is_unavailable(checkpoint: Path) -> None:
    decoder = TransformersDecoder(checkpoint)
    with pytest.raises(EncoderUnavailable):
        await decoder.generate(TEXT, WARM)
    async with decoder:
        await decoder.generate(TEXT, WARM)
    with pytest.raises(EncoderUnavailable):
        await decoder.generate(TEXT, WARM)
    with pytest.raises(EncoderUnavailable):
        decoder.chat_prompt([{"role": "user", "content": "hi"}])
    with pytest.raises(EncoderUnavailable):
        _ = decoder.width
    await decoder.aclose()


def test_it_loads_and_shuts_down_without_a_loop(checkpoint: Path) -> None:
    threads = threading.active_count()
    decoder = TransformersDecoder(checkpoint)
    decoder.load()
    assert asyncio.run(decoder.generate(TEXT, WARM)) == asyncio.run(decoder.generate(TEXT, WARM))
    decoder.shutdown()
    assert threading.active_count() == threads


async def test_a_model_that_cannot_be_loaded_says_so_and_leaves_nothing_running(tmp_path: Path) -> None:
    threads = threading.active_count()
    with pytest.raises((OSError, ValueError)):
        await TransformersDecoder(tmp_path).aload()
    assert threading.active_count() == threads
