"""Artifacts as tensors in a prompt: the splice."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from retinue.errors import EncoderFailed
from retinue.prompt.layout import lay_out, name_image

__all__ = ["Prompt", "all_finite", "splice"]


@dataclass(frozen=True, eq=False)
class Prompt:
    """Token ids with image rows between them; its three fields are vLLM's of the same names.

    ``embeds``: (length, hidden), on the CPU; zeros where ``is_token_ids`` is True, an image's row where
    it is False. ``token_ids`` holds the placeholder there.
    """

    token_ids: list[int]
    is_token_ids: list[bool]
    embeds: Tensor


def splice(
    token_ids: Sequence[int],
    placeholder_id: int,
    artifacts: Sequence[Any],
    *,
    hidden_size: int,
    dtype: torch.dtype | None = None,
) -> Prompt:
    """Put the n-th artifact where the n-th placeholder is.

    ``artifacts``: one per image, each ``(rows, hidden_size)`` of floating point: a tensor on any device,
    or what ``torch.tensor`` takes, such as an array. They are copied, never aliased. ``dtype``: of the
    embeddings; None: the artifacts' own, and of several the narrowest that holds them all.

    ``InvalidInput``: not as many placeholders as artifacts. ``EncoderFailed``: an artifact of another
    rank, width or kind, without rows, or with a value that is not finite in ``dtype`` (one such row makes
    vLLM answer other requests wrongly, later).
    """
    images = [
        _checked(artifact, hidden_size, name_image(index, len(artifacts)))
        for index, artifact in enumerate(artifacts)
    ]
    layout = lay_out(token_ids, placeholder_id, [len(image) for image in images])
    embeds = torch.zeros(len(layout.token_ids), hidden_size, dtype=dtype or _common_dtype(images))
    for image, span in zip(images, layout.spans, strict=True):
        embeds[span.start : span.stop] = image  # copies and casts
    if not all_finite(embeds):
        wrong = next(
            n for n, span in enumerate(layout.spans) if not all_finite(embeds[span.start : span.stop])
        )
        what = f"{name_image(wrong, len(images))}: its artifact has values that are not finite"
        raise EncoderFailed(f"{what} in {embeds.dtype}")
    return Prompt(layout.token_ids, layout.is_token_ids, embeds)


def _checked(artifact: Any, hidden_size: int, name: str) -> Tensor:
    try:
        image = artifact.detach().cpu() if isinstance(artifact, Tensor) else torch.tensor(artifact)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = type(artifact).__name__
        raise EncoderFailed(f"{name}: its artifact, a {kind}, cannot be read as a tensor") from error
    if not image.is_floating_point():
        raise EncoderFailed(f"{name}: its artifact has dtype {image.dtype}, not a floating point one")
    if image.ndim != 2 or image.shape[1] != hidden_size or image.shape[0] < 1:
        raise EncoderFailed(
            f"{name}: its artifact has shape {tuple(image.shape)}, "
            f"not (rows, {hidden_size}) with 1 row or more"
        )
    return image


def _common_dtype(images: Sequence[Tensor]) -> torch.dtype:
    dtypes = [image.dtype for image in images] or [torch.get_default_dtype()]
    return functools.reduce(torch.promote_types, dtypes)


def all_finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite; ``values`` are of floating point.

    A sum is finite only if all its terms are, and takes a tenth of the time that asking each does.
    """
    return bool(values.sum(dtype=torch.float32).isfinite()) or bool(values.isfinite().all())
