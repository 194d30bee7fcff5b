"""Several texts written at once, by hand: the promises of ``retinue.decoders.drafts`` and ``model``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from transformers import PreTrainedModel

from retinue.decoders.drafts import Draft, write
from retinue.decoders.generation import Generation, GenerationOptions
from retinue.decoders.model import TextModel
from retinue.decoders.stream import Listener
from retinue.errors import EncoderFailed
from retinue.prompt.tensors import Prompt, splice

Decode = Callable[[list[int]], str]
IMAGE = 329
NOTHING: frozenset[int] = frozenset()


def prompt(seed: int, text: int, *rows: int) -> Prompt:
    """So many text tokens before each image of so many rows, and after the last; all of it random."""
    generator = torch.Generator().manual_seed(seed)

    def words() -> list[int]:
        return torch.randint(1, 300, (text,), generator=generator).tolist()

    ids = words()
    for _ in rows:
        ids += [IMAGE, *words()]
    return splice(ids, IMAGE, [torch.randn(n, 64, generator=generator) for n in rows], hidden_size=64)


PROMPTS = [prompt(0, 1), prompt(1, 9, 4), prompt(2, 3, 16, 2), prompt(3, 20), prompt(4, 2, 36), prompt(5, 40)]


def write_all(
    model: TextModel, decode: Decode, prompts: Sequence[Prompt], options: Sequence[GenerationOptions]
) -> list[Generation]:
    drafts = [Draft(p, o, decode) for p, o in zip(prompts, options, strict=True)]
    write(model, drafts)
    return [finished(draft) for draft in drafts]


def finished(draft: Draft) -> Generation:
    result = draft.result()
    assert isinstance(result, Generation)
    return result


def reference(model: PreTrainedModel, prompt: Prompt, max_new_tokens: int) -> list[int]:
    """Transformers' own greedy generation, alone."""
    is_text = torch.tensor(prompt.is_token_ids)
    with torch.inference_mode():
        embeds = model.get_input_embeddings()(torch.tensor(prompt.token_ids).where(is_text, 0))
        embeds[~is_text] = prompt.embeds[~is_text]
    generated = cast(Any, model).generate(
        inputs_embeds=embeds[None],
        attention_mask=torch.ones(1, len(embeds), dtype=torch.long),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        pad_token_id=0,
    )
    tokens: list[int] = generated[0].tolist()
    return tokens


def count_forwards(model: PreTrainedModel) -> tuple[list[int], Any]:
    """Record how many rows each forward has; the second value removes the hook."""
    rows: list[int] = []
    handle = model.register_forward_pre_hook(
        lambda _, __, kwargs: rows.append(len(kwargs["inputs_embeds"])), with_kwargs=True
    )
    return rows, handle


def test_a_batch_writes_token_for_token_what_each_prompt_gets_alone(
    model: PreTrainedModel, text_model: TextModel, decode: Decode
) -> None:
    lengths = [24, 7, 16, 1, 24, 12]
    options = [GenerationOptions(max_new_tokens=length) for length in lengths]
    written = write_all(text_model, decode, PROMPTS, options)
    expected = [reference(model, p, length) for p, length in zip(PROMPTS, lengths, strict=True)]
    assert [generation.token_ids for generation in written] == expected
    assert len({tuple(tokens[:4]) for tokens in expected}) > 3  # the models do not say one thing to all
    for generation, p in zip(written, PROMPTS, strict=True):
        assert generation.prompt_tokens == len(p.token_ids)
        ended = generation.token_ids[-1] == 0
        assert generation.finish_reason == ("stop" if ended else "length")
        assert generation.text == decode(generation.token_ids)


def test_any_of_several_end_tokens_ends_a_text_and_stays_out_of_it(
    model: PreTrainedModel, text_model: TextModel, decode: Decode
) -> None:
    expected = reference(model, PROMPTS[1], 8)
    text_model.end_ids = frozenset({317, expected[3]})
    [generation] = write_all(text_model, decode, [PROMPTS[1]], [GenerationOptions(max_new_tokens=8)])
    end = expected.index(expected[3]) + 1
    assert generation.token_ids == expected[:end]
    assert generation.text == decode(expected[: end - 1])
    assert generation.finish_reason == "stop"


@pytest.mark.parametrize("ids", [5, [5, 6], None])
def test_the_end_tokens_are_those_of_the_generation_config(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, ids: int | list[int] | None
) -> None:
    monkeypatch.setattr(model.generation_config, "eos_token_id", ids)
    assert TextModel(model).end_ids == frozenset([ids] if isinstance(ids, int) else ids or [])


def test_the_same_seed_draws_the_same_text_whatever_shares_the_batch(
    text_model: TextModel, decode: Decode
) -> None:
    text_model.end_ids = NOTHING
    seeded = GenerationOptions(max_new_tokens=16, temperature=1.0, top_p=0.95, seed=7)
    [alone] = write_all(text_model, decode, [PROMPTS[1]], [seeded])
    other = GenerationOptions(max_new_tokens=9, temperature=1.5, seed=1)
    greedy = GenerationOptions(max_new_tokens=12)
    company = write_all(
        text_model, decode, [PROMPTS[5], PROMPTS[1], PROMPTS[2], PROMPTS[1]], [other, seeded, greedy, other]
    )
    assert company[1] == alone
    assert company[3].token_ids != alone.token_ids[:9]


def test_without_a_seed_every_text_is_drawn_anew(text_model: TextModel, decode: Decode) -> None:
    text_model.end_ids = NOTHING
    unseeded = GenerationOptions(max_new_tokens=24, temperature=5.0)
    first, second = write_all(text_model, decode, [PROMPTS[1]] * 2, [unseeded] * 2)
    assert first.token_ids != second.token_ids


def test_a_stop_string_ends_its_own_text_only(
    model: PreTrainedModel, text_model: TextModel, decode: Decode
) -> None:
    text_model.end_ids = NOTHING
    prompts = [PROMPTS[1], PROMPTS[3]]
    whole, other = write_all(text_model, decode, prompts, [GenerationOptions(max_new_tokens=24)] * 2)
    stop = whole.text[5:8]
    cut, same = write_all(
        text_model,
        decode,
        prompts,
        [GenerationOptions(max_new_tokens=24, stop=("never", stop)), GenerationOptions(max_new_tokens=24)],
    )
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)] != whole.token_ids
    assert same == other


def test_what_only_began_like_a_stop_string_ends_the_text_after_all(
    text_model: TextModel, decode: Decode
) -> None:
    text_model.end_ids = NOTHING
    [whole] = write_all(text_model, decode, [PROMPTS[3]], [GenerationOptions(max_new_tokens=12)])
    options = GenerationOptions(max_new_tokens=12, stop=(whole.text[-2:] + "and more",))
    assert write_all(text_model, decode, [PROMPTS[3]], [options]) == [whole]


def test_rows_leave_the_batch_as_they_finish(
    model: PreTrainedModel, text_model: TextModel, decode: Decode
) -> None:
    text_model.end_ids = NOTHING
    rows, hook = count_forwards(model)
    with hook:
        write_all(text_model, decode, PROMPTS[:3], [GenerationOptions(max_new_tokens=n) for n in (4, 1, 2)])
    assert rows == [3, 2, 1, 1]


def test_a_text_whose_caller_left_gets_no_further_token_and_its_neighbours_all_of_theirs(
    model: PreTrainedModel, text_model: TextModel, decode: Decode
) -> None:
    text_model.end_ids = NOTHING
    options = GenerationOptions(max_new_tokens=8)
    [alone] = write_all(text_model, decode, [PROMPTS[1]], [options])
    leaver, stayer, gone = (Draft(p, options, decode) for p in PROMPTS[:3])
    gone.leave()  # before the batch began
    rows: list[int] = []

    def forward(module: object, args: object, kwargs: dict[str, Any]) -> None:
        rows.append(len(kwargs["inputs_embeds"]))
        if len(rows) == 3:
            leaver.leave()  # while its third token is computed

    with model.register_forward_pre_hook(forward, with_kwargs=True):
        write(text_model, [leaver, stayer, gone])
    assert rows == [2, 2, 2, 1, 1, 1, 1, 1]
    assert (len(leaver.token_ids), len(gone.token_ids)) == (3, 0)
    assert finished(stayer) == alone


def test_a_batch_that_failed_midway_goes_on_where_it_stopped(
    model: PreTrainedModel, text_model: TextModel, decode: Decode
) -> None:
    text_model.end_ids = NOTHING
    options = [
        GenerationOptions(max_new_tokens=12),
        GenerationOptions(max_new_tokens=12, temperature=1.0, seed=3),
        GenerationOptions(max_new_tokens=2),
    ]
    expected = write_all(text_model, decode, PROMPTS[1:4], options)
    drafts = [Draft(p, o, decode) for p, o in zip(PROMPTS[1:4], options, strict=True)]
    rows: list[int] = []

    def fail(module: object, args: object, kwargs: dict[str, Any]) -> None:
        rows.append(len(kwargs["inputs_embeds"]))
        if len(rows) == 6:
            raise MemoryError

    with model.register_forward_pre_hook(fail, with_kwargs=True):
        with pytest.raises(MemoryError):
            write(text_model, drafts)
        write(text_model, drafts[:1])  # as the batcher does: again, in parts
        write(text_model, drafts[1:])
    assert [finished(draft) for draft in drafts] == expected
    assert rows == [3, 3] + [2] * 4 + [1] * 7 + [1] * 7


def test_a_text_whose_logits_are_not_finite_fails_alone(
    model: PreTrainedModel, text_model: TextModel, decode: Decode
) -> None:
    text_model.end_ids = NOTHING
    options = [
        GenerationOptions(max_new_tokens=4),
        GenerationOptions(max_new_tokens=4, temperature=1.0, seed=1),
    ]
    expected = write_all(text_model, decode, PROMPTS[:2], options)
    sick = Draft(PROMPTS[2], GenerationOptions(temperature=1.0), decode)
    drafts = [sick, *(Draft(p, o, decode) for p, o in zip(PROMPTS[:2], options, strict=True))]

    def poison(module: object, args: object, output: Any) -> None:
        if len(output.logits) == 3:
            output.logits[0, -1, 5] = torch.nan

    with model.register_forward_hook(poison):
        write(text_model, drafts)
    assert isinstance(sick.result(), EncoderFailed)
    assert sick.result() is not sick.result()
    assert [finished(draft) for draft in drafts[1:]] == expected


class FakeLoop:
    """Runs what it is called with, and counts."""

    def __init__(self, *, closed: bool = False) -> None:
        self.calls = 0
        self._closed = closed

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: object) -> None:
        if self._closed:
            raise RuntimeError("Event loop is closed")
        self.calls += 1
        callback(*args)


def listener(loop: FakeLoop) -> Listener:
    return Listener(cast(asyncio.AbstractEventLoop, loop), asyncio.Queue())


def heard(listener: Listener) -> str:
    return "".join(str(listener.pieces.get_nowait()) for _ in range(listener.pieces.qsize()))


def test_the_streams_of_one_loop_share_one_wake_up_per_token(text_model: TextModel, decode: Decode) -> None:
    text_model.end_ids = NOTHING
    one, two = FakeLoop(), FakeLoop()
    listeners = [listener(one), listener(one), listener(one), listener(two)]
    options = GenerationOptions(max_new_tokens=10)
    drafts = [Draft(p, options, decode, ear) for p, ear in zip(PROMPTS, listeners, strict=False)]
    write(text_model, drafts)
    assert one.calls <= 10
    assert two.calls <= 10
    assert [heard(ear) for ear in listeners] == [finished(draft).text for draft in drafts]


def test_a_closed_loop_costs_its_own_texts_only(text_model: TextModel, decode: Decode) -> None:
    text_model.end_ids = NOTHING
    options = GenerationOptions(max_new_tokens=40)
    orphan = Draft(PROMPTS[1], options, decode, listener(FakeLoop(closed=True)))
    neighbour = Draft(PROMPTS[3], options, decode)
    write(text_model, [orphan, neighbour])
    assert len(orphan.token_ids) < 40
    assert len(neighbour.token_ids) == 40


def test_a_model_that_takes_no_embeddings_is_refused_by_name() -> None:
    class Odd(torch.nn.Module):
        def forward(self, input_ids: object, attention_mask: object) -> None: ...

    with pytest.raises(ValueError, match="Odd does not take inputs_embeds"):
        TextModel(cast(PreTrainedModel, Odd()))
