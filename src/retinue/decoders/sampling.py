"""Which token comes next."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from retinue.decoders.generation import GenerationOptions

__all__ = ["choose"]


def choose(logits: Tensor, options: Sequence[GenerationOptions], chances: Sequence[float]) -> list[int]:
    """Return each row's next token: its likeliest, or the one that its chance falls on.

    ``logits``: (rows, vocab), finite or -inf. ``chances``: one number in [0, 1) per row, unused where the
    temperature is 0. A row's choice depends on nothing of its neighbours'.
    """
    tokens = logits.argmax(dim=-1)  # (rows,)
    drawn = [row for row, option in enumerate(options) if option.temperature > 0]
    if drawn:
        tokens[drawn] = _draw(
            logits[drawn].double(),
            logits.new_tensor([options[row].temperature for row in drawn], dtype=torch.float64),
            logits.new_tensor([options[row].top_p for row in drawn], dtype=torch.float64),
            logits.new_tensor([chances[row] for row in drawn], dtype=torch.float64),
        )
    return [int(token) for token in tokens.tolist()]


def _draw(logits: Tensor, temperature: Tensor, top_p: Tensor, chance: Tensor) -> Tensor:
    """Inverse transform sampling, in the vocabulary's order.

    Not in the order of likelihood: there, rounding that swaps two near neighbours would change the draw.
    """
    best = logits.amax(dim=-1, keepdim=True)  # subtracted first, so that no temperature overflows
    odds = ((logits - best) / temperature[:, None]).softmax(dim=-1)  # (rows, vocab)
    if bool((top_p < 1).any()):
        odds = odds.where(odds >= _least_odds(odds, top_p), 0.0)
    cumulative = odds.cumsum(dim=-1)  # (rows, vocab)
    total = cumulative[:, -1:]  # (rows, 1)
    return torch.searchsorted(cumulative, chance[:, None] * total, right=True)[:, 0].clamp(
        max=logits.shape[-1] - 1
    )


def _least_odds(odds: Tensor, top_p: Tensor) -> Tensor:
    """The odds of the last token that is still drawn: the likelier ones alone do not reach ``top_p``."""
    ranked = odds.sort(dim=-1, descending=True).values  # (rows, vocab)
    before = ranked.cumsum(dim=-1) - ranked  # (rows, vocab); never below 0, so the likeliest always stays
    return ranked.where(before < top_p[:, None], 1.0).amin(dim=-1, keepdim=True)  # (rows, 1)
