"""A Hugging Face model as the decoder needs it: embeddings in, the next token's logits out, a cache between.

Everything here runs on the actor thread, except reading a ``TextModel``'s attributes.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

__all__ = ["CachedBatch", "TextModel"]


class TextModel:
    """Any causal model that takes ``inputs_embeds``, an attention mask, positions and a cache.

    ``width``: of an embedding. ``context``: positions that it was made for; None: not known.
    ``end_ids``: the tokens that end a text. Of ``generation_config``, nothing else is used: how to
    sample is the request's to say.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        parameters = inspect.signature(model.forward).parameters
        for name in ("inputs_embeds", "attention_mask", "position_ids"):
            if name not in parameters:
                raise ValueError(f"{type(model).__name__} does not take {name}")
        self._model = model
        self._model.train(False)
        self._embed = model.get_input_embeddings()
        self._cache_name = (
            "cache" if "cache" in parameters else "past_key_values"
        )  # as older transformers call it
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        weight = self._embed.weight
        assert isinstance(weight, Tensor)
        self.vocab_size, self.width = weight.shape
        self.dtype, self.device = weight.dtype, weight.device
        self.context: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        end_ids = model.generation_config.eos_token_id
        self.end_ids = frozenset([end_ids] if isinstance(end_ids, int) else end_ids or ())

    def new_cache(self) -> DynamicCache:
        """An empty cache, with the sliding windows that the model has."""
        return DynamicCache(config=self._model.config)

    def embed(self, token_ids: Sequence[int]) -> Tensor:
        """Look up the embeddings of text, (length, width)."""
        embeds = self._embed(torch.tensor(token_ids, device=self.device))  # (length, width)
        assert isinstance(embeds, Tensor)
        return embeds

    def forward(self, embeds: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        """Run new positions (rows, length, width) after the cached ones; return (rows, vocab)."""
        output = self._model(
            inputs_embeds=embeds,
            attention_mask=mask,  # (rows, cached + length)
            position_ids=positions,  # (rows, length)
            use_cache=True,
            **{self._cache_name: cache},
            **self._last_only,
        )
        logits = output.logits
        assert isinstance(logits, Tensor)
        return logits[:, -1]


class CachedBatch:
    """Texts that grow together, one token each per ``step``, over one cache.

    Prompts of several lengths are padded on the left, so that all rows end at the same position;
    padded on the right, a row's next token would follow padding.
    """

    def __init__(self, model: TextModel) -> None:
        self._model = model
        self._cache = model.new_cache()
        self._mask = torch.empty(0)

    def start(self, prompts: Sequence[Tensor]) -> Tensor:
        """Run the prompts, each (length, width); return the logits of what follows, (rows, vocab)."""
        longest = max(len(prompt) for prompt in prompts)
        padded = prompts[0].new_zeros(len(prompts), longest, self._model.width)  # (rows, longest, width)
        self._mask = torch.zeros(len(prompts), longest, dtype=torch.long, device=padded.device)
        for row, prompt in enumerate(prompts):
            padded[row, longest - len(prompt) :] = prompt
            self._mask[row, longest - len(prompt) :] = 1
        positions = (self._mask.cumsum(dim=-1) - 1).clamp(min=0)  # (rows, longest)
        return self._model.forward(padded, self._mask, positions, self._cache)

    def step(self, token_ids: Sequence[int]) -> Tensor:
        """Add one token to each row; return the logits of what follows, (rows, vocab)."""
        embeds = self._model.embed(token_ids)[:, None]  # (rows, 1, width)
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(token_ids), 1)], dim=-1)
        positions = self._mask.sum(dim=-1, keepdim=True) - 1  # (rows, 1)
        return self._model.forward(embeds, self._mask, positions, self._cache)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows. It always pays: a step copies the whole cache anyway, to append to it."""
        index = torch.tensor(rows, device=self._mask.device)
        self._mask = self._mask[index]
        self._cache.batch_select_indices(index)
