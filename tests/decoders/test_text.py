"""Token ids into text as they come: the promises of ``retinue.decoders.text``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from retinue.decoders.text import Detokenizer, StopFilter

texts = st.text(st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"]))


def utf8(token_ids: Sequence[int]) -> str:
    """A tokenizer whose ids are bytes, the hardest there is."""
    return bytes(token_ids).decode(errors="replace")


def pieces(decode: Callable[[list[int]], str], token_ids: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(decode)
    return [*(detokenizer.add(token_id) for token_id in token_ids), detokenizer.rest()]


@given(texts)
def test_a_piece_never_holds_half_a_character_and_none_is_lost(text: str) -> None:
    given = pieces(utf8, text.encode())
    assert "".join(given) == text
    assert not any("\ufffd" in piece for piece in given)


def test_a_character_is_given_as_soon_as_it_is_complete() -> None:
    assert pieces(utf8, "aé€".encode()) == ["a", "", "é", "", "", "€", ""]


@given(st.binary())
def test_bytes_that_are_no_text_come_out_as_the_tokenizer_decodes_them(garbage: bytes) -> None:
    assert "".join(pieces(utf8, garbage)) == utf8(garbage)


@pytest.mark.parametrize("text", ["the cat on the mat", "naïve 👋🏽 cats, 42!", " leading space"])
def test_spaces_are_the_tokenizers(any_tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    def decode(token_ids: list[int]) -> str:
        return str(any_tokenizer.decode(token_ids))

    token_ids = any_tokenizer(text)["input_ids"]
    assert "".join(pieces(decode, token_ids)) == decode(token_ids)


def filtered(chunks: Sequence[str], stop: Sequence[str]) -> tuple[list[str], bool]:
    stop_filter = StopFilter(stop)
    given = []
    for chunk in chunks:
        given.append(stop_filter.add(chunk))
        if stop_filter.stopped:
            return given, True
    return [*given, stop_filter.rest()], False


def test_text_ends_before_the_stop_string_and_holds_back_its_beginning() -> None:
    assert filtered(["one, tw", "o, S", "TO", "P three"], ["STOP"]) == (["one, tw", "o, ", "", ""], True)


def test_what_only_began_like_a_stop_string_is_given_after_all() -> None:
    assert filtered(["a S", "TO", "RM", " ST"], ["STOP"]) == (["a ", "", "STORM", " ", "ST"], False)


def test_the_stop_string_that_is_complete_first_wins_and_of_two_the_longest() -> None:
    assert filtered(["xabcd"], ["abcd", "bc"]) == (["xa"], True)
    assert filtered(["xabc"], ["bc", "abc"]) == (["x"], True)


@given(st.lists(st.text("ab", max_size=4)), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3))
def test_the_result_does_not_depend_on_the_cuts(chunks: list[str], stop: list[str]) -> None:
    by_chunk, stopped = filtered(chunks, stop)
    by_character, stopped_too = filtered("".join(chunks), stop)
    assert ("".join(by_chunk), stopped) == ("".join(by_character), stopped_too)
    assert not any(string in "".join(by_chunk) for string in stop)
    assert stopped == any(string in "".join(chunks) for string in stop)
