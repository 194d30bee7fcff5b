"""What the end of a call means: the promises of ``retinue.batching.outcome`` that need no actor."""

from __future__ import annotations

import asyncio
import concurrent.futures

import pytest

from retinue.batching.outcome import describe, forget_frames, start_error
from retinue.errors import EncoderFailed


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("bad pixel"), "ValueError: bad pixel"),
        (MemoryError(), "MemoryError"),
        (KeyError("k"), "KeyError: 'k'"),
        (SystemExit(3), "SystemExit: 3"),
    ],
)
def test_an_error_is_described_by_type_and_text(error: BaseException, text: str) -> None:
    assert describe(error) == text


@pytest.mark.parametrize("error", [ValueError("x"), OSError(2, "x"), MemoryError(), EncoderFailed("x")])
def test_an_ordinary_error_of_on_start_comes_out_as_it_is(error: BaseException) -> None:
    assert start_error(error) is error


@pytest.mark.parametrize(
    "error",
    [
        StopIteration(),
        StopAsyncIteration(),
        SystemExit(3),
        KeyboardInterrupt(),
        GeneratorExit(),
        asyncio.CancelledError(),
        concurrent.futures.CancelledError(),
    ],
    ids=lambda error: f"{type(error).__module__}.{type(error).__name__}",
)
def test_one_that_would_end_the_caller_or_not_arrive_comes_out_as_a_cause(error: BaseException) -> None:
    shown = start_error(error)
    assert type(shown) is EncoderFailed
    assert shown.__cause__ is error
    assert type(error).__name__ in str(shown)


def test_frames_are_forgotten_in_a_ring_of_causes_too() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__context__ = second, first
    forget_frames(first)
