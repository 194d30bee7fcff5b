"""Prompts for an engine of vLLM that you drive yourself: token ids and artifacts in, ``EmbedsPrompt`` out.

An engine believes its prompts. An embedding of another width or a token id outside the vocabulary ends it,
for every request; a value that is not finite makes it answer other requests wrongly, later; a mask that is
not made of plain bools hangs it. So a prompt is proven right here, before the engine sees it.

This module needs no vLLM: it makes the plain dict that ``EmbedsPrompt`` is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from retinue.errors import EncoderFailed, InvalidInput
from retinue.prompt.tensors import Prompt, all_finite, splice

if TYPE_CHECKING:
    from vllm.inputs import EmbedsPrompt, TokensPrompt

__all__ = ["EngineModel"]


@dataclass(frozen=True, kw_only=True)
class EngineModel:
    """What the model of an engine takes, and prompts that are certain to be it. Any thread may use it.

    ``hidden_size``: the width of an embedding. ``context``: the most tokens of prompt and text together.
    ``vocab_size``: token ids are below it. ``dtype``: of the embeddings.
    """

    hidden_size: int
    context: int
    vocab_size: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: Any) -> EngineModel:
        """Read vLLM's ``ModelConfig``, which is an engine's ``model_config``, or a Hugging Face config.

        The latter is for a process that has no engine of its own: it does not know the ``dtype`` and
        ``max_model_len`` that an engine was given. ``ValueError``: an engine that does not take embeddings,
        or a config that lacks one of our fields.
        """
        if hasattr(config, "max_model_len"):
            if not config.enable_prompt_embeds:
                raise ValueError("the engine takes no embeddings: give it enable_prompt_embeds=True")
            return cls(
                hidden_size=config.get_inputs_embeds_size(),
                context=config.max_model_len,
                vocab_size=config.get_vocab_size(),
                dtype=config.dtype,
            )
        text = config.get_text_config()
        names = ("hidden_size", "max_position_embeddings", "vocab_size")
        if missing := [name for name in names if getattr(text, name, None) is None]:
            raise ValueError(f"{type(text).__name__} does not say its {', '.join(missing)}")
        dtype = text.dtype or torch.float32
        return cls(
            hidden_size=text.hidden_size,
            context=text.max_position_embeddings,
            vocab_size=text.vocab_size,
            dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype,
        )

    def prompt(
        self, token_ids: Sequence[int], placeholder_id: int, artifacts: Sequence[Any]
    ) -> EmbedsPrompt | TokensPrompt:
        """Put the n-th artifact where the n-th placeholder is; give the result to ``generate``.

        ``placeholder_id``: any integer. One that the vocabulary does not have, such as -1, is one that no
        text can spell. ``artifacts``: as for ``splice``, and its errors. Raises what ``accept`` raises too.
        """
        text = len(token_ids) - list(token_ids).count(placeholder_id)
        if text >= self.context:  # its length is the caller's to choose: make no embeddings for it
            raise self._too_long(f"the prompt's text alone has {text} tokens")
        prompt = splice(token_ids, placeholder_id, artifacts, hidden_size=self.hidden_size, dtype=self.dtype)
        return self._form_of(prompt, lambda: prompt.embeds)  # which ``splice`` has proven

    def accept(self, prompt: Prompt) -> EmbedsPrompt | TokensPrompt:
        """Check what ``splice`` or ``Chat.prompt`` made, and give it the form that ``generate`` takes.

        At an image's rows the engine ignores the token id, except that a repetition penalty counts it as
        said; one that is outside the vocabulary becomes token 0 there. Without images it is a
        ``TokensPrompt``, which shares the prefix cache with other text.

        ``InvalidInput``: a prompt that is empty or leaves no room in the context for one new token; an id of
        text outside the vocabulary. ``EncoderFailed``: embeddings of another shape, or not finite.
        """
        return self._form_of(prompt, lambda: self._checked(prompt.embeds, len(prompt.token_ids)))

    def _form_of(self, prompt: Prompt, embeds: Callable[[], Tensor]) -> EmbedsPrompt | TokensPrompt:
        length = len(prompt.token_ids)
        is_token_ids = [bool(is_text) for is_text in prompt.is_token_ids]
        if length == 0:
            raise InvalidInput("the prompt is empty")
        if len(is_token_ids) != length:
            raise InvalidInput(f"the prompt has {length} token ids and {len(is_token_ids)} is_token_ids")
        rows = is_token_ids.count(False)
        if length >= self.context:
            raise self._too_long(f"the prompt has {length} tokens, of which images are {rows}")
        token_ids = self._in_vocabulary(prompt.token_ids, is_token_ids)
        if not rows:
            return {"prompt_token_ids": token_ids}
        return {
            "prompt_token_ids": token_ids,
            "prompt_is_token_ids": is_token_ids,
            "prompt_embeds": embeds(),
        }

    def _in_vocabulary(self, token_ids: Sequence[int], is_token_ids: Sequence[bool]) -> list[int]:
        known = []
        for position, (token_id, is_text) in enumerate(zip(token_ids, is_token_ids, strict=True)):
            is_known = 0 <= token_id < self.vocab_size
            if is_text and not is_known:
                raise InvalidInput(
                    f"prompt token {position} is {token_id}, outside the vocabulary of {self.vocab_size}"
                )
            known.append(operator.index(token_id) if is_known else 0)  # 0 is what vLLM itself puts there
        return known

    def _checked(self, embeds: Tensor, length: int) -> Tensor:
        if embeds.shape != (length, self.hidden_size):
            raise EncoderFailed(
                f"the prompt's embeddings have shape {tuple(embeds.shape)}, not {(length, self.hidden_size)}"
            )
        embeds = embeds.detach().to("cpu", self.dtype)
        if not all_finite(embeds):
            raise EncoderFailed(f"the prompt's embeddings are not all finite in {self.dtype}")
        return embeds

    def _too_long(self, what: str) -> InvalidInput:
        return InvalidInput(
            f"{what}; the model's context of {self.context} leaves room for {self.context - 1}"
        )
