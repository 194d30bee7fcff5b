"""What a request may ask of a decoder, and what it gets."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

from retinue.errors import InvalidInput

__all__ = ["Generation", "GenerationOptions"]


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """How one text is generated; ``InvalidInput`` at birth for what makes no sense.

    ``max_new_tokens``: at most so many; with the prompt's they must fit the model's context.
    ``temperature``: 0 takes the likeliest token each time. ``top_p``: draw only from the likeliest tokens
    that together have this probability. ``seed``: the same seed draws the same text, whatever shares its
    batch, as far as float rounding allows. ``stop``: strings that end the text and are not part of it.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _is_int(self.max_new_tokens) or self.max_new_tokens < 1:
            raise InvalidInput(f"max_new_tokens={self.max_new_tokens!r} is not an integer of 1 or more")
        if not _is_number(self.temperature) or not 0 <= self.temperature <= sys.float_info.max:
            raise InvalidInput(f"temperature={self.temperature!r} is not a number of 0 or more")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise InvalidInput(f"top_p={self.top_p!r} is not a number above 0 and at most 1")
        if self.seed is not None and not _is_int(self.seed):
            raise InvalidInput(f"seed={self.seed!r} is not an integer")
        if not _is_stop(self.stop):
            raise InvalidInput(f"stop={self.stop!r} is not a tuple of strings that are not empty")


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A finished text.

    ``token_ids``: all that were generated, the model's end token included. ``text``: what they say,
    without special tokens and up to the stop string. ``finish_reason``: "stop" for an end token or a stop
    string, "length" for ``max_new_tokens``. ``prompt_tokens``: positions of the prompt, image rows included.
    """

    text: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_int(value) or isinstance(value, float)


def _is_stop(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(string, str) and string for string in value)
