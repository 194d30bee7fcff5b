"""Artifacts as tensors in a prompt: the splice."""

from __future__ import annotations

import ctypes
import functools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from retinue.errors import EncoderFailed
from retinue.prompt.layout import lay_out, name_image

__all__ = ["Prompt", "all_finite", "pieces", "splice"]

_FEW_BYTES = 2**15
_ALONE = 2**15 - 1  # elements; from there on torch divides its work
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# The first bytes of what is not finite, in all of these formats, and of numbers from 2**121 on.
_HUGE = bytes(byte for byte in range(256) if byte & 0x7C == 0x7C)


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
    embeds = torch.empty(len(layout.token_ids), hidden_size, dtype=dtype or _common_dtype(images))
    text_from = 0
    for number, (image, span) in enumerate(zip(images, layout.spans, strict=True)):
        _clear(embeds[text_from : span.start])
        if not _copy(image, embeds[span.start : span.stop]):
            what = f"{name_image(number, len(images))}: its artifact has values that are not finite"
            raise EncoderFailed(f"{what} in {embeds.dtype}")
        text_from = span.stop
    _clear(embeds[text_from:])
    return Prompt(layout.token_ids, layout.is_token_ids, embeds)


def _clear(rows: Tensor) -> None:
    for piece in pieces(rows):
        piece.zero_()


def _copy(image: Tensor, rows: Tensor) -> bool:
    """Copy and cast; whether all that came of it is finite, asked while it is in the cache."""
    return all(
        _is_finite(piece.copy_(source)) for piece, source in zip(pieces(rows), pieces(image), strict=True)
    )


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


def pieces(values: Tensor) -> Sequence[Tensor]:
    """``values`` in rows so few that torch works on them alone, without its other threads.

    Those it would wait for, and long where an engine has the cores; docs/log.md has the figures.
    """
    divided: tuple[Tensor, ...] = values.split(max(1, _ALONE * len(values) // max(1, values.numel())))
    return divided


def all_finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite; ``values`` are of floating point."""
    if values.device.type != "cpu":
        return _is_finite(values)
    return _far_from_infinite(values) or all(map(_is_finite, pieces(values)))


def _is_finite(values: Tensor) -> bool:
    """A sum is finite only if all its terms are, and takes a tenth of the time that asking each does."""
    return math.isfinite(values.sum(dtype=torch.float32).item()) or bool(values.isfinite().all())


def _far_from_infinite(values: Tensor) -> bool:
    """Whether the first byte of each value, its sign and exponent, says so; asked of a few values only.

    Of those a sum takes longer, for each call of torch gives the interpreter's lock away.
    """
    size = values.itemsize
    if (
        values.dtype not in _DTYPES
        or values.nbytes > _FEW_BYTES
        or values.device.type != "cpu"
        or not values.is_contiguous()
    ):
        return False
    first = size - 1 if sys.byteorder == "little" else 0
    exponents = ctypes.string_at(values.data_ptr(), values.nbytes)[first::size]
    return len(exponents.translate(None, _HUGE)) == len(exponents)
