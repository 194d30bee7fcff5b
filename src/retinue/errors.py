"""The error tree: who is at fault, and what a client of a server sees.

    RetinueError
    ├── InvalidInput        (ValueError)    the caller's image or request              400, message shown
    ├── Overloaded                          no room now; come back in retry_after s    429
    ├── DeadlineExceeded    (TimeoutError)  waited too long                            504
    ├── EncoderFailed       (RuntimeError)  the backend raised or broke its contract   500, message not shown
    └── EncoderUnavailable  (RuntimeError)  not started, shutting down, crashed        503

Every caller gets an exception object of its own, never one that a neighbour holds too.

``BackendLost`` goes the other way: a backend raises it to say that it has to be built again.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

__all__ = [
    "HTTP_STATUS",
    "BackendLost",
    "DeadlineExceeded",
    "EncoderFailed",
    "EncoderUnavailable",
    "InvalidInput",
    "Overloaded",
    "RetinueError",
]


class RetinueError(Exception):
    """Root of all errors that this package raises on a request's behalf."""


class _Positioned(Exception):
    def __init__(self, *args: object, position: int | None = None) -> None:
        super().__init__(*args)
        self.position = position

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles, as ``Overloaded`` does."""
        return partial(type(self), position=self.position), self.args, self.__dict__


class InvalidInput(_Positioned, RetinueError, ValueError):
    """The caller's image or request is at fault; the message is written for the caller to read.

    ``position``: which of the request's images (or items) it is about, from 0; None if about all or none.
    """


class Overloaded(RetinueError):
    """There is no room now. ``retry_after`` says in how many seconds there probably is."""

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles, so that it survives the way from one process to another."""
        return partial(type(self), retry_after=self.retry_after), self.args, self.__dict__


class DeadlineExceeded(RetinueError, TimeoutError):
    """The request waited longer than it was allowed to."""


class EncoderFailed(_Positioned, RetinueError, RuntimeError):
    """The backend raised, or broke its contract; ``__cause__`` is what it raised.

    The message may quote the backend and is for logs, not for clients. ``position``: which of the request's
    images (or items) made it fail, from 0; None if that is not known.
    """


class EncoderUnavailable(RetinueError, RuntimeError):
    """Nobody can serve the request: not started, shutting down, or crashed."""


class BackendLost(Exception):
    """Raised by a backend that can serve nothing more until it is closed and built again.

    A device that was reset, say, or a process behind it that died.
    """


#: The status that a server answers with; one entry for each leaf of the tree.
HTTP_STATUS: Mapping[type[RetinueError], int] = MappingProxyType(
    {
        InvalidInput: 400,
        Overloaded: 429,
        DeadlineExceeded: 504,
        EncoderFailed: 500,
        EncoderUnavailable: 503,
    }
)
