"""The error tree: one status for each leaf, builtin bases, and errors that survive a copy."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator

import pytest

from retinue import errors
from retinue.errors import (
    HTTP_STATUS,
    DeadlineExceeded,
    EncoderFailed,
    EncoderUnavailable,
    InvalidInput,
    Overloaded,
    RetinueError,
)


def leaves(error: type[RetinueError]) -> Iterator[type[RetinueError]]:
    """The classes under ``error``, as errors.py draws them, that have none under them."""
    below = [sub for sub in error.__subclasses__() if sub.__module__ == errors.__name__]
    for sub in below:
        yield from leaves(sub)
    if not below:
        yield error


def test_each_leaf_of_the_tree_has_a_status_and_nothing_else_has() -> None:
    assert set(HTTP_STATUS) == set(leaves(RetinueError))


@pytest.mark.parametrize(
    ("error", "status", "builtin"),
    [
        (InvalidInput, 400, ValueError),
        (Overloaded, 429, Exception),
        (EncoderFailed, 500, RuntimeError),
        (EncoderUnavailable, 503, RuntimeError),
        (DeadlineExceeded, 504, TimeoutError),
    ],
)
def test_an_error_says_who_is_at_fault_by_its_status_and_its_builtin_base(
    error: type[RetinueError], status: int, builtin: type[Exception]
) -> None:
    assert HTTP_STATUS[error] == status
    assert issubclass(error, RetinueError)
    assert issubclass(error, builtin)


def test_the_statuses_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        HTTP_STATUS[InvalidInput] = 418  # type: ignore[index]  # the case


def test_every_public_name_of_the_module_is_exported() -> None:
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert set(errors.__all__) == {
        name for name in classes if issubclass(getattr(errors, name), RetinueError)
    } | {"BackendLost", "HTTP_STATUS"}


def test_overloaded_says_when_to_come_back() -> None:
    assert Overloaded("no room", retry_after=1.5).retry_after == 1.5
    with pytest.raises(TypeError):
        Overloaded("no room")  # type: ignore[call-arg]  # the case


class Throttled(Overloaded):
    pass


@pytest.mark.parametrize(
    "error",
    [
        RetinueError("a text"),
        InvalidInput("a text"),
        InvalidInput("a text", position=2),
        Overloaded("a text", retry_after=2.5),
        Throttled("a text", retry_after=2.5),
        DeadlineExceeded("a text"),
        EncoderFailed("a text"),
        EncoderUnavailable("a text"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize(
    "through",
    [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy],
    ids=["pickle", "copy", "deepcopy"],
)
def test_an_error_survives_pickling_and_copying(
    error: RetinueError, through: Callable[[RetinueError], RetinueError]
) -> None:
    error.request_id = "7"  # type: ignore[attr-defined]  # what somebody hung on it
    again = through(error)
    assert again is not error
    assert type(again) is type(error)
    assert again.args == error.args
    assert str(again) == "a text"
    assert vars(again) == vars(error)
