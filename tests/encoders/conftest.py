"""One tiny model of each family, whole and split, for the whole session."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import PIL.Image
import pytest
import torch
from torch import Tensor

from retinue.tools.split import Split, split

from .tiny import FAMILIES, Whole, picture

#: Of other sizes and shapes, so that each family tiles them differently.
PICTURES = [picture(40, 30, 1), picture(90, 20, 2), picture(25, 70, 3), picture(16, 16, 4)]
#: Which of the pictures a request has: each alone, and several.
REQUESTS = [(0,), (1,), (2,), (3,), (0, 1), (2, 0, 1)]


@dataclass(frozen=True, eq=False)
class Case:
    """A model before and after it was split, and what it said before."""

    whole: Whole
    halves: Split

    @cached_property
    def before(self) -> list[tuple[list[int], Tensor]]:
        """For each of ``REQUESTS``: the whole model's greedy tokens and what its language model saw."""
        return [self.whole.answer(pictures(request)) for request in REQUESTS]

    def token_ids(self, images: int) -> list[int]:
        """The prompt about so many images, with one placeholder for each."""
        ids: list[int] = self.whole.processor.tokenizer(self.whole.prompt(images))["input_ids"]
        return ids

    @property
    def placeholder_id(self) -> int:
        return int(self.whole.model.config.image_token_id)


def pictures(request: tuple[int, ...]) -> list[PIL.Image.Image]:
    return [PICTURES[index] for index in request]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """For models so small, a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return made(request.param, tmp_path_factory.mktemp(request.param))


def made(name: str, folder: Path) -> Case:
    """A family's model, split."""
    return Case(FAMILIES[name](folder / "whole"), split(folder / "whole", folder / "halves"))
