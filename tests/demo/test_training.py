"""The training script runs; what it makes is what ``build`` and the decoder read."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from retinue.demo.drawing import draw, font_glyphs, handwritten_glyphs, held_out_font_glyphs
from retinue.demo.encoder import DigitsEncoder
from retinue.demo.prompt import Label, answer, questions
from retinue.demo.run import pictures
from retinue.demo.train import Recipe, train

TINY = Recipe(
    pictures=12,
    seeing_steps=2,
    seeing_batch=4,
    new_pictures=12,
    answering_steps=2,
    answering_batch=2,
    requests=4,
)


def test_two_steps_of_training_write_a_checkpoint_that_loads(tmp_path: Path) -> None:
    train(tmp_path, TINY)
    backend = DigitsEncoder()
    backend.build(str(tmp_path))
    prepared = backend.preprocess(pictures()[0].data)
    [artifact] = backend.forward_batch([prepared.item])
    assert artifact.shape == (prepared.cost, backend.hidden_size)


def test_answers_follow_from_the_labels() -> None:
    labels = [Label(4, "red"), Label(2, "black")]
    asked = {kind: of_kind[-1] for kind, of_kind in questions(2).items()}
    assert {kind: answer(question, labels) for kind, question in asked.items()} == {
        "spell": "42",
        "count": "2",
        "nth digit": "2",
        "nth color": "black",
        "largest": "4",
        "list colors": "red, black",
    }


@pytest.mark.parametrize("size", [(16, 16), (20, 55), (200, 90)])
def test_drawing_is_a_function_of_the_seed_and_fits_the_size(size: tuple[int, int]) -> None:
    for glyphs in (font_glyphs(bent=False), held_out_font_glyphs(), handwritten_glyphs(held_out=True)):
        first, again = (draw(random.Random(5), glyphs, size) for _ in range(2))
        assert first[0].size == size
        assert first[0].tobytes() == again[0].tobytes()
        assert first[1] == again[1]
