"""Where each image's rows lie in a prompt: arithmetic on token ids, no tensors."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from retinue.errors import EncoderFailed, InvalidInput


class Span(NamedTuple):
    """The positions ``start`` to ``stop - 1`` of a prompt, as in a slice."""

    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """A prompt's positions: ``token_ids`` and ``is_token_ids`` are equally long, ``spans`` has one per image.

    ``is_token_ids`` holds plain bools, as vLLM wants them: False where a position is an image's row and
    its token id only a placeholder.
    """

    token_ids: list[int]
    is_token_ids: list[bool]
    spans: list[Span]


def lay_out(token_ids: Sequence[int], placeholder_id: int, rows: Sequence[int]) -> Layout:
    """Repeat the n-th placeholder in ``token_ids`` ``rows[n]`` times.

    ``InvalidInput``: not as many placeholders as images. ``EncoderFailed``: an image without rows.
    """
    ids = [operator.index(token_id) for token_id in token_ids]  # plain ints, whatever they came as
    if (placeholders := ids.count(placeholder_id)) != len(rows):
        raise InvalidInput(
            f"the prompt has {placeholders} image placeholders (token {placeholder_id}) "
            f"and there are {len(rows)} images"
        )
    layout = Layout([], [], [])
    for token_id in ids:
        if token_id == placeholder_id:
            image = len(layout.spans)
            if rows[image] < 1:
                raise EncoderFailed(f"{name_image(image, len(rows))} has {rows[image]} rows, not 1 or more")
            start = len(layout.token_ids)
            layout.spans.append(Span(start, start + rows[image]))
            layout.token_ids.extend([token_id] * rows[image])
            layout.is_token_ids.extend([False] * rows[image])
        else:
            layout.token_ids.append(token_id)
            layout.is_token_ids.append(True)
    return layout


def name_image(index: int, count: int) -> str:
    """How an error calls an image: counted from 1."""
    return f"image {index + 1} of {count}"
