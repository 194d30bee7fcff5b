"""Errors as an OpenAI client reads them: ``{"error": {"message", "type", "param", "code"}}``.

What the caller can mend is shown to the caller; what is ours goes to the log, and the client learns no more
than that it was ours.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import orjson
from starlette.responses import Response

from retinue.errors import (
    HTTP_STATUS,
    DeadlineExceeded,
    EncoderFailed,
    EncoderUnavailable,
    InvalidInput,
    Overloaded,
    RetinueError,
)

__all__ = ["error_body", "error_response", "refusal", "status_of"]

logger = logging.getLogger("retinue")

_CODES: Mapping[type[RetinueError], str] = MappingProxyType(
    {
        InvalidInput: "invalid_input",
        Overloaded: "overloaded",
        DeadlineExceeded: "deadline_exceeded",
        EncoderFailed: "encoder_failed",
        EncoderUnavailable: "encoder_unavailable",
    }
)
_OURS = "the server failed to answer; its log says why"
_UNAVAILABLE = "the server cannot answer now; its log says why"
_MOST_CHARACTERS = 1000  # of what a client is told: it may quote the client, who may have said anything


def status_of(error: BaseException) -> int:
    """The HTTP status of ``error``; 500 for what is not in the tree."""
    return next((status for kind, status in HTTP_STATUS.items() if isinstance(error, kind)), 500)


def error_body(error: BaseException, *, param: str | None = None) -> dict[str, Any]:
    """The JSON that says what ``error`` was, without our internals; those are logged.

    ``param`` names the part of the request that is at fault, as in ``messages[0].content[2]``.
    """
    code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), "internal_error")
    if isinstance(error, EncoderUnavailable):  # once more for each request, and it may quote the backend
        logger.warning("a request was refused: %s", error)
        message = _UNAVAILABLE
    elif isinstance(error, RetinueError) and not isinstance(error, EncoderFailed):
        message = str(error)
    else:
        logger.error("a request failed: %s", error, exc_info=error)
        message = _OURS
    return _body(status_of(error), message, param, code)


def error_response(error: BaseException, *, param: str | None = None) -> Response:
    """``error_body`` with its status; with Retry-After where the error knows one."""
    headers = {}
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    return _json(status_of(error), error_body(error, param=param), headers)


def refusal(status: int, message: str, *, code: str, param: str | None = None) -> Response:
    """The refusal of a request for what is no error of the tree: no such path, no key, too large."""
    return _json(status, _body(status, message, param, code), {})


def _body(status: int, message: str, param: str | None, code: str) -> dict[str, Any]:
    shown = None if param is None else _shown(param)
    return {"error": {"message": _shown(message), "type": _type(status), "param": shown, "code": code}}


def _shown(text: str) -> str:
    """``text`` of a bounded length, and with half a surrogate pair, which UTF-8 cannot say, spelled out."""
    short = text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + "..."
    return short.encode("utf-8", "backslashreplace").decode()


def _type(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def _json(status: int, body: Mapping[str, Any], headers: Mapping[str, str]) -> Response:
    return Response(orjson.dumps(body), status, headers, media_type="application/json")
