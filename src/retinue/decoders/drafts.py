"""Texts in the making, and the loop that makes several at once.

Thread rules
    A caller makes a ``Draft`` and submits it; from then on it is the actor thread's, where ``write`` runs.
    ``Draft.leave`` may be called from any thread.
    Of a ``Listener``, the actor thread only calls its loop's ``call_soon_threadsafe``.

A draft carries all its progress. So when a batch fails midway and is run again in parts, each draft goes on
where it stopped: nothing is computed or streamed twice.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from retinue.decoders.generation import Generation, GenerationOptions
from retinue.decoders.model import CachedBatch, TextModel
from retinue.decoders.sampling import choose
from retinue.decoders.stream import Listener
from retinue.decoders.text import Detokenizer, StopFilter
from retinue.errors import EncoderFailed
from retinue.prompt.tensors import Prompt, all_finite

__all__ = ["Draft", "write"]


class Draft:
    """One generation in the making."""

    def __init__(
        self,
        prompt: Prompt,
        options: GenerationOptions,
        decode: Callable[[list[int]], str],
        listener: Listener | None = None,
    ) -> None:
        self.prompt = prompt
        self.options = options
        self.listener = listener
        self.token_ids: list[int] = []
        self.finish_reason: Literal["stop", "length"] | None = None
        self.failed = ""  # what was not finite, if anything was
        self._detokenizer = Detokenizer(decode)
        self._stop = StopFilter(options.stop)
        self._text = ""
        self._sent = 0  # so many of the text's characters went to the listener
        self._random = None if options.seed is None else random.Random(options.seed)
        self._left = threading.Event()

    def leave(self) -> None:
        """Say that nobody waits for this text any more: it gets no further token."""
        self._left.set()

    @property
    def wanted(self) -> bool:
        """Whether there is more to write."""
        return self.finish_reason is None and not self.failed and not self._left.is_set()

    def chance(self) -> float:
        """The number in [0, 1) that decides the next token; one is used up per token."""
        return (self._random or random).random()

    def add(self, token_id: int, end_ids: frozenset[int]) -> None:
        """Take the next token, and finish if it is the last."""
        self.token_ids.append(token_id)
        if token_id in end_ids:
            self._finish("stop")
            return
        self._say(self._detokenizer.add(token_id))
        if self.finish_reason is None and len(self.token_ids) == self.options.max_new_tokens:
            self._finish("length")

    def unsent(self) -> str:
        """Take the text that the listener has not got yet."""
        text, self._sent = self._text[self._sent :], len(self._text)
        return text

    def result(self) -> Generation | EncoderFailed:
        """The finished generation, or why there is none. Of a text that nobody wants, either will do."""
        if self.failed:
            return EncoderFailed(f"{self.failed} are not all finite")
        return Generation(
            text=self._text,
            token_ids=list(self.token_ids),
            finish_reason=self.finish_reason or "length",
            prompt_tokens=len(self.prompt.token_ids),
        )

    def _finish(self, reason: Literal["stop", "length"]) -> None:
        self._say(self._detokenizer.rest())  # its last character may complete a stop string
        if self.finish_reason is None:
            self._text += self._stop.rest()
            self.finish_reason = reason

    def _say(self, text: str) -> None:
        self._text += self._stop.add(text)
        if self._stop.stopped:
            self.finish_reason = "stop"


@torch.inference_mode()
def write(model: TextModel, drafts: Sequence[Draft]) -> None:
    """Write on every draft, a token each at a time, until it is finished or nobody wants it."""
    prompts = {draft: _embed(model, draft) for draft in drafts if draft.wanted}
    for draft, embeds in prompts.items():
        if not all_finite(embeds):
            draft.failed = "the prompt's embeddings"
    running = [draft for draft in prompts if draft.wanted]
    if not running:
        return
    batch = CachedBatch(model)
    logits = batch.start([prompts.pop(draft) for draft in running])
    while True:
        _add_tokens(running, logits, model.end_ids)
        _deliver(running)
        kept = [row for row, draft in enumerate(running) if draft.wanted]
        if not kept:
            return
        if len(kept) < len(running):
            running = [running[row] for row in kept]
            batch.keep(kept)
        logits = batch.step([draft.token_ids[-1] for draft in running])


def _add_tokens(drafts: Sequence[Draft], logits: Tensor, end_ids: frozenset[int]) -> None:
    finite = logits.amax(dim=-1).isfinite().tolist()  # of a row with NaN, the largest is NaN
    tokens = choose(logits, [draft.options for draft in drafts], [draft.chance() for draft in drafts])
    for draft, token_id, is_finite in zip(drafts, tokens, finite, strict=True):
        if is_finite:
            draft.add(token_id, end_ids)
        else:
            draft.failed = "the language model's logits"


def _deliver(drafts: Iterable[Draft]) -> None:
    """Hand new text to the listeners: one wake-up per event loop, however many of them it has."""
    mail: dict[asyncio.AbstractEventLoop, list[tuple[Draft, str]]] = defaultdict(list)
    for draft in drafts:
        if draft.listener and (text := draft.unsent()):
            mail[draft.listener.loop].append((draft, text))
    for loop, letters in mail.items():
        try:
            loop.call_soon_threadsafe(_open, letters)
        except RuntimeError:  # the loop is closed, so nobody listens there any more
            for draft, _ in letters:
                draft.leave()


def _open(letters: Iterable[tuple[Draft, str]]) -> None:
    for draft, text in letters:
        if draft.listener:
            draft.listener.pieces.put_nowait(text)


def _embed(model: TextModel, draft: Draft) -> Tensor:
    """The prompt and what was written so far as embeddings, (length, width)."""
    is_text = draft.prompt.is_token_ids
    # A placeholder need not be in the vocabulary; any id will do where an image's row takes its place.
    prompt_ids = [
        token_id if text else 0 for token_id, text in zip(draft.prompt.token_ids, is_text, strict=True)
    ]
    embeds = model.embed([*prompt_ids, *draft.token_ids])
    rows = [position for position, text in enumerate(is_text) if not text]
    embeds[rows] = draft.prompt.embeds[rows].to(embeds)
    return embeds
