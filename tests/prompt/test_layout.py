"""Where images lie in a prompt: the promises of ``retinue.prompt.layout``."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retinue.errors import EncoderFailed, InvalidInput
from retinue.prompt import Layout, Span, lay_out

IMAGE = 7

#: A prompt as the test sees it: a text id, or the number of rows of an image.
text_ids = st.integers(0, 20).filter(lambda token_id: token_id != IMAGE)
parts = st.lists(st.one_of(text_ids, st.integers(1, 5).map(lambda rows: (rows,))))


def compose(prompt: list[int | tuple[int]]) -> Layout:
    return lay_out(
        [IMAGE if isinstance(part, tuple) else part for part in prompt],
        IMAGE,
        [part[0] for part in prompt if isinstance(part, tuple)],
    )


def test_each_placeholder_becomes_as_many_positions_as_its_image_has_rows() -> None:
    assert lay_out([1, IMAGE, 2, IMAGE], IMAGE, [2, 1]) == Layout(
        token_ids=[1, IMAGE, IMAGE, 2, IMAGE],
        is_token_ids=[True, False, False, True, False],
        spans=[Span(1, 3), Span(4, 5)],
    )


@given(parts)
def test_text_ids_keep_their_order_and_values(prompt: list[int | tuple[int]]) -> None:
    layout = compose(prompt)
    kept = [
        token_id for token_id, is_text in zip(layout.token_ids, layout.is_token_ids, strict=True) if is_text
    ]
    assert kept == [part for part in prompt if not isinstance(part, tuple)]


@given(parts)
def test_the_spans_are_exactly_the_positions_that_are_not_text(prompt: list[int | tuple[int]]) -> None:
    layout = compose(prompt)
    inside = [position for span in layout.spans for position in range(*span)]
    outside = [position for position, is_text in enumerate(layout.is_token_ids) if is_text]
    assert inside == sorted(set(inside))  # in order and disjoint
    assert sorted(inside + outside) == list(range(len(layout.token_ids)))
    assert all(layout.token_ids[position] == IMAGE for position in inside)


@given(parts)
def test_lengths_agree(prompt: list[int | tuple[int]]) -> None:
    layout = compose(prompt)
    rows = [part[0] for part in prompt if isinstance(part, tuple)]
    assert [span.stop - span.start for span in layout.spans] == rows
    assert len(layout.token_ids) == len(layout.is_token_ids) == len(prompt) - len(rows) + sum(rows)


def test_the_mask_holds_plain_bools_and_the_ids_plain_ints() -> None:
    class Index:
        def __index__(self) -> int:
            return IMAGE

    layout = lay_out([1, Index()], IMAGE, [2])  # type: ignore[list-item]  # such as a NumPy integer
    assert [type(value) for value in layout.is_token_ids] == [bool] * 3
    assert [type(value) for value in layout.token_ids] == [int] * 3


@pytest.mark.parametrize(
    ("ids", "rows"), [([1, IMAGE, IMAGE], [4]), ([IMAGE, IMAGE], [1, 1, 1]), ([IMAGE], [])]
)
def test_a_count_mismatch_is_the_callers_and_names_both_numbers(ids: list[int], rows: list[int]) -> None:
    with pytest.raises(InvalidInput, match=rf"{ids.count(IMAGE)} image placeholders .* {len(rows)} images"):
        lay_out(ids, IMAGE, rows)


def test_an_image_without_rows_is_the_encoders_and_is_named() -> None:
    with pytest.raises(EncoderFailed, match="image 2 of 3 has 0 rows"):
        lay_out([IMAGE] * 3, IMAGE, [1, 0, 2])


def test_the_layout_needs_no_torch() -> None:
    program = "import sys, retinue.prompt; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)
