"""What the end of a call means for its callers: results that are checked, errors that are their own."""

from __future__ import annotations

import builtins
import concurrent.futures
import contextlib
import logging
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

from retinue.errors import DeadlineExceeded, EncoderFailed, EncoderUnavailable, RetinueError

logger = logging.getLogger("retinue")

_GROUP: Any = getattr(builtins, "BaseExceptionGroup", ())  # (): before Python 3.11, no instance of it


class Words(NamedTuple):
    """What errors call an input and the function that runs batches of them."""

    item: str = "item"
    call: str = "fn"

    def place(self, indices: Sequence[int], count: int) -> str:
        """Some inputs of a request of ``count``: "item 2 of 3", "items 1 and 3 of 3"."""
        numbers = [str(index + 1) for index in indices]
        if len(numbers) == 1:
            return f"{self.item} {numbers[0]} of {count}"
        return f"{self.item}s {', '.join(numbers[:-1])} and {numbers[-1]} of {count}"


WORDS = Words()


class Refused:
    """In place of a result: what came out for this one item must not be delivered, and why.

    The text of ``error`` does not name the item; the batcher does.
    """

    __slots__ = ("error",)

    def __init__(self, error: EncoderFailed) -> None:
        self.error = error


class ContractBroken(EncoderFailed):
    """What ``fn`` returned is not one result per item. Never leaves this package: ``call_failed``."""


def one_per_item(results: Any, expected: int, call: str = "fn") -> Sequence[Any]:
    """``results`` as a list or tuple of ``expected``; ``ContractBroken`` if it is anything else.

    An array or tensor whose first axis is the batch is split along it.
    """
    if not isinstance(results, (list, tuple)):
        shape = getattr(results, "shape", None)
        if not isinstance(shape, tuple) or not shape:
            raise ContractBroken(
                f"{call} must return one result per item: expected a list or tuple of {expected}, "
                f"got {type(results).__name__}"
            )
        results = list(results)
    split: Sequence[Any] = results
    if len(split) != expected:
        raise ContractBroken(f"{call} must return one result per item: expected {expected}, got {len(split)}")
    return split


def describe(error: BaseException) -> str:
    """The error's type and text, whatever its ``__str__`` does."""
    try:
        text = str(error)
    except Exception:
        text = "(its text cannot be shown)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def forget_frames(error: BaseException) -> None:
    """Clear the local variables of all frames that ``error``, its causes and its parts hold; the lines stay.

    Otherwise whoever keeps the exception keeps the batch's items too.
    """
    seen: set[int] = set()
    errors: list[BaseException | None] = [error]
    while errors:
        link = errors.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            traceback.clear_frames(link.__traceback__)
            errors += (link.__cause__, link.__context__)
            if isinstance(link, _GROUP):
                errors += link.exceptions


def log_error(what: str, error: BaseException) -> None:
    """Log ``error`` with its traceback; a handler that raises must not take the thread with it."""
    with contextlib.suppress(Exception):
        logger.error(what, exc_info=error)


def call_failed(what: str, cause: BaseException, call: str, position: int | None) -> EncoderFailed:
    """``what``: how its text begins."""
    if isinstance(cause, ContractBroken):
        return EncoderFailed(f"{what}{cause}", position=position)
    failed = EncoderFailed(f"{what}{call} raised {describe(cause)}", position=position)
    failed.__cause__ = cause
    return failed


def refused(what: str, refusal: Refused, position: int) -> EncoderFailed:
    """The error of the one item whose result was ``refusal``."""
    failed = EncoderFailed(f"{what}: {refusal.error}", position=position)
    failed.__cause__ = refusal.error.__cause__
    return failed


def too_late(what: str, call: str, timeout_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"{what}: {call} has been running for more than forward_timeout_s={timeout_s:g}")


def unavailable(text: str, cause: BaseException | None = None) -> EncoderUnavailable:
    error = EncoderUnavailable(text)
    error.__cause__ = cause
    return error


def shut_down() -> RetinueError:
    return EncoderUnavailable("shut down before the request was served")


#: asyncio refuses the first, and turns the last into the caller's own cancellation.
_NOT_FOR_FUTURES = (StopIteration, StopAsyncIteration, concurrent.futures.CancelledError)


def start_error(error: BaseException) -> BaseException:
    """``error`` itself where a future can carry it and a caller cannot take it for its own ending."""
    if isinstance(error, Exception) and not isinstance(error, _NOT_FOR_FUTURES):
        return error
    failed = EncoderFailed(f"on_start raised {describe(error)}")
    failed.__cause__ = error
    return failed
