"""What a request may ask: the promises of ``retinue.decoders.generation``."""

from __future__ import annotations

from typing import Any

import pytest

from retinue.decoders.generation import GenerationOptions
from retinue.errors import InvalidInput


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", 1.5),
        ("max_new_tokens", True),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("seed", 1.0),
        ("seed", False),
        ("stop", "end"),
        ("stop", ["end"]),
        ("stop", ("",)),
    ],
)
def test_what_makes_no_sense_is_refused_at_birth_by_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(InvalidInput) as refusal:
        GenerationOptions(**{name: value})
    assert str(refusal.value).startswith(f"{name}={value!r} is not ")


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError):
        GenerationOptions(top_k=3)  # type: ignore[call-arg]
