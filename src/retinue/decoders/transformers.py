"""The embedded decoder: a Hugging Face causal language model in this process.

Thread rules
    The model lives on the batcher's thread: it is built, run and released there and nowhere else.
    Everything public may be called from any thread or event loop; ``generate`` and ``stream`` need a loop.

A batch is static: what arrives while it runs waits for its longest text. A row that is finished, or whose
caller has left, costs nothing from the next token on.
"""

from __future__ import annotations

import asyncio
import operator
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from types import TracebackType

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from retinue.batching import ThreadedMicroBatcher
from retinue.decoders.chat import Chat, Message
from retinue.decoders.drafts import Draft, write
from retinue.decoders.generation import Generation, GenerationOptions
from retinue.decoders.model import TextModel
from retinue.decoders.stream import Listener, TextStream
from retinue.errors import EncoderFailed, EncoderUnavailable, InvalidInput
from retinue.prompt.tensors import Prompt

__all__ = ["Generation", "GenerationOptions", "TextStream", "TransformersDecoder"]

_DEFAULTS = GenerationOptions()


class TransformersDecoder:
    """Continues prompts with any causal model that takes ``inputs_embeds``; requests share its batches.

    ``model_path``: a folder with the model and its tokenizer (or a Hub name); its own code is never run.
    ``dtype``: "auto" is the checkpoint's. ``device``: None is CUDA where there is one, else the CPU.
    ``max_batch_items``: so many texts are written at once.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        max_batch_items: int = 16,
        dtype: str | torch.dtype = "auto",
        device: str | None = None,
        name: str = "decoder",
    ) -> None:
        self._model_path = os.fspath(model_path)
        self._dtype = dtype
        self._device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._loaded: _Loaded | None = None
        self._batcher: ThreadedMicroBatcher[Draft, Generation | EncoderFailed] = ThreadedMicroBatcher(
            self._write,
            max_batch_items=max_batch_items,
            on_start=self._build,
            on_stop=self._release,
            name=name,
        )

    # ---- life

    def load(self) -> None:
        """Load the model and wait for it; raises what that raised."""
        self._batcher.start()

    async def aload(self) -> None:
        """``load`` without blocking the event loop."""
        await self._batcher.astart()

    def shutdown(self, wait: bool = True) -> None:
        """Release the model, once the running batch is written; what still waits fails."""
        self._batcher.shutdown(wait)

    async def aclose(self) -> None:
        """``shutdown`` without blocking the event loop."""
        await self._batcher.aclose()

    async def __aenter__(self) -> TransformersDecoder:
        await self.aload()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # ---- requests

    @property
    def width(self) -> int:
        """The width of an embedding, and so of an image's rows; ``EncoderUnavailable``: not loaded."""
        return self._running().model.width

    @property
    def context(self) -> int | None:
        """The most tokens of prompt and text together; None: the model does not say. Raises as ``width``."""
        return self._running().model.context

    def chat_prompt(self, messages: Sequence[Message]) -> Prompt:
        """Put ``messages`` with artifacts through the model's chat template; see ``Chat.prompt``."""
        loaded = self._running()
        return loaded.chat.prompt(messages, hidden_size=loaded.model.width, context=loaded.model.context)

    async def generate(
        self, prompt: Prompt | Sequence[int], options: GenerationOptions = _DEFAULTS
    ) -> Generation:
        """Continue ``prompt``: what ``splice`` or ``chat_prompt`` made, or token ids alone.

        ``InvalidInput``: an empty or too long prompt, an id outside the vocabulary. ``EncoderFailed``:
        embeddings of another width or not finite, or the model raised. ``EncoderUnavailable``: not loaded.
        """
        return await self._generate(self._draft(prompt, options))

    def stream(self, prompt: Prompt | Sequence[int], options: GenerationOptions = _DEFAULTS) -> TextStream:
        """Begin to continue ``prompt`` on the running event loop; iterate the result for the text.

        Raises at once what ``generate`` raises for a bad prompt; other errors come out of the iteration.
        """
        listener = Listener(asyncio.get_running_loop(), asyncio.Queue())
        draft = self._draft(prompt, options, listener)
        return TextStream(listener, self._generate(draft), draft.leave)

    async def _generate(self, draft: Draft) -> Generation:
        try:
            [result] = await self._batcher.submit([draft])
        finally:
            draft.leave()
        if isinstance(result, EncoderFailed):
            raise result
        return result

    def _draft(
        self, prompt: Prompt | Sequence[int], options: GenerationOptions, listener: Listener | None = None
    ) -> Draft:
        loaded = self._running()
        if not isinstance(prompt, Prompt):
            ids = [operator.index(token_id) for token_id in prompt]
            embeds = torch.zeros(1, loaded.model.width).expand(len(ids), -1)  # (length, width), of one row
            prompt = Prompt(ids, [True] * len(ids), embeds)
        _check(prompt, options.max_new_tokens, loaded.model)
        return Draft(prompt, options, loaded.decode, listener)

    def _running(self) -> _Loaded:
        if self._loaded is None:
            raise EncoderUnavailable("the decoder is not loaded")
        return self._loaded

    # ---- on the batcher's thread

    def _build(self) -> None:
        model = AutoModelForCausalLM.from_pretrained(self._model_path, dtype=self._dtype)
        model.to(self._device)  # type: ignore[arg-type]  # its decorator loses the self of the signature
        tokenizer = AutoTokenizer.from_pretrained(self._model_path)

        def decode(token_ids: list[int]) -> str:
            return str(
                tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            )

        self._loaded = _Loaded(TextModel(model), Chat(tokenizer), decode)

    def _release(self) -> None:
        self._loaded = None

    def _write(self, drafts: list[Draft]) -> list[Generation | EncoderFailed]:
        write(self._running().model, drafts)
        return [draft.result() for draft in drafts]


@dataclass(frozen=True)
class _Loaded:
    """What ``_build`` made, published as one value."""

    model: TextModel
    chat: Chat
    decode: Callable[[list[int]], str]


def _check(prompt: Prompt, max_new_tokens: int, model: TextModel) -> None:
    """Refuse here what would fail in a batch; whether all is finite, its thread finds out."""
    length = len(prompt.token_ids)
    if length == 0:
        raise InvalidInput("the prompt is empty")
    if len(prompt.is_token_ids) != length:
        raise InvalidInput(f"the prompt has {length} token ids and {len(prompt.is_token_ids)} is_token_ids")
    if model.context is not None and length + max_new_tokens > model.context:
        raise InvalidInput(
            f"the prompt's {length} tokens and max_new_tokens={max_new_tokens} make "
            f"{length + max_new_tokens}, more than the model's context of {model.context}"
        )
    text_ids = list(compress(prompt.token_ids, prompt.is_token_ids))
    if text_ids and not 0 <= min(text_ids) <= max(text_ids) < model.vocab_size:
        wrong = next(token_id for token_id in text_ids if not 0 <= token_id < model.vocab_size)
        position = next(
            n
            for n, (token_id, is_text) in enumerate(zip(prompt.token_ids, prompt.is_token_ids, strict=True))
            if is_text and token_id == wrong
        )
        raise InvalidInput(
            f"prompt token {position} is {wrong}, outside the vocabulary of {model.vocab_size}"
        )
    if prompt.embeds.shape != (length, model.width):
        raise EncoderFailed(
            f"the prompt's embeddings have shape {tuple(prompt.embeds.shape)}, not {(length, model.width)}"
        )
