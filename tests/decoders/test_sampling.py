"""Which token comes next: the promises of ``retinue.decoders.sampling``."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from retinue.decoders.generation import GenerationOptions
from retinue.decoders.sampling import choose

DRAWS = 1000
CHANCES = [(n + 0.5) / DRAWS for n in range(DRAWS)]  # evenly over [0, 1), so counts are shares
ODDS = torch.tensor([0.1, 0.4, 0.0, 0.2, 0.3])
GREEDY = GenerationOptions()


def shares(options: GenerationOptions) -> dict[int, float]:
    tokens = choose(ODDS.log().expand(DRAWS, -1), [options] * DRAWS, CHANCES)
    return {token: count / DRAWS for token, count in sorted(Counter(tokens).items())}


def test_temperature_0_takes_the_likeliest_and_of_equals_the_first() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 1.0]])
    assert choose(logits, [GREEDY, GREEDY], [0.9, 0.9]) == [1, 0]


def test_temperature_1_draws_each_token_as_often_as_it_is_likely() -> None:
    assert shares(GenerationOptions(temperature=1.0)) == pytest.approx({0: 0.1, 1: 0.4, 3: 0.2, 4: 0.3})


def test_temperature_sharpens_and_flattens() -> None:
    assert shares(GenerationOptions(temperature=0.5))[1] == pytest.approx(0.16 / 0.30, abs=0.002)
    assert shares(GenerationOptions(temperature=1e6)) == pytest.approx(dict.fromkeys([0, 1, 3, 4], 0.25))


@pytest.mark.parametrize("temperature", [1e-320, 1e-30, 1e-3])
def test_a_tiny_temperature_is_greedy_and_no_overflow(temperature: float) -> None:
    assert shares(GenerationOptions(temperature=temperature)) == {1: 1.0}


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1e-9, {1}), (0.4, {1}), (0.41, {1, 4}), (0.7, {1, 4}), (0.71, {1, 3, 4}), (0.91, {0, 1, 3, 4})],
)
def test_top_p_draws_from_the_fewest_tokens_that_reach_it_in_their_proportions(
    top_p: float, kept: set[int]
) -> None:
    total = sum(float(ODDS[token]) for token in kept)
    expected = {token: float(ODDS[token]) / total for token in sorted(kept)}
    assert shares(GenerationOptions(temperature=1.0, top_p=top_p)) == pytest.approx(expected, abs=0.002)


def test_a_token_that_the_model_rules_out_is_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf]])
    for chance in (0.0, 0.5, 1 - 2**-53):
        assert choose(logits, [GenerationOptions(temperature=1.0)], [chance]) == [1]


def test_a_rows_choice_depends_on_nothing_of_its_neighbours() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    options = [
        GenerationOptions(temperature=temperature, top_p=top_p)
        for temperature, top_p in [(0, 1.0), (1, 1.0), (0.7, 0.9), (2, 0.5), (0, 0.3), (1, 1.0)]
    ]
    chances = [0.1, 0.3, 0.5, 0.7, 0.9, 0.99]
    alone = [choose(logits[row : row + 1], [options[row]], [chances[row]])[0] for row in range(len(options))]
    assert choose(logits, options, chances) == alone
