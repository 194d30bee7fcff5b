"""What the end of a call means for its callers: results that are checked, errors that are their own."""

from __future__ import annotations

import builtins
import concurrent.futures
import contextlib
import logging
import traceback
from collections.abc import Sequence
from typing import Any

from retinue.errors import EncoderFailed, EncoderUnavailable, RetinueError

logger = logging.getLogger("retinue")

_GROUP: Any = getattr(builtins, "BaseExceptionGroup", ())  # (): before Python 3.11, no instance of it


def one_per_item(results: Any, expected: int) -> Sequence[Any]:
    """``results`` as a list or tuple of ``expected``; ``EncoderFailed`` if it is anything else.

    An array or tensor whose first axis is the batch is split along it.
    """
    if not isinstance(results, (list, tuple)):
        shape = getattr(results, "shape", None)
        if not isinstance(shape, tuple) or not shape:
            raise EncoderFailed(
                f"fn must return one result per item: expected a list or tuple of {expected}, "
                f"got {type(results).__name__}"
            )
        results = list(results)
    split: Sequence[Any] = results
    if len(split) != expected:
        raise EncoderFailed(f"fn must return one result per item: expected {expected}, got {len(split)}")
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


def _caused_by(error: RetinueError, cause: BaseException) -> RetinueError:
    error.__cause__ = cause
    return error


def call_failed(cause: BaseException) -> RetinueError:
    if isinstance(cause, EncoderFailed) and cause.__cause__ is None:  # the result contract, broken
        return EncoderFailed(*cause.args)
    return _caused_by(EncoderFailed(f"fn raised {describe(cause)}"), cause)


def crashed(cause: BaseException) -> RetinueError:
    return _caused_by(EncoderUnavailable(f"the batching thread crashed: {describe(cause)}"), cause)


def shut_down() -> RetinueError:
    return EncoderUnavailable("shut down before the request was served")


#: asyncio refuses the first, and turns the last into the caller's own cancellation.
_NOT_FOR_FUTURES = (StopIteration, StopAsyncIteration, concurrent.futures.CancelledError)


def start_error(error: BaseException) -> BaseException:
    """``error`` itself where a future can carry it and a caller cannot take it for its own ending."""
    if isinstance(error, Exception) and not isinstance(error, _NOT_FOR_FUTURES):
        return error
    return _caused_by(EncoderFailed(f"on_start raised {describe(error)}"), error)
