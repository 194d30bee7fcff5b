"""The door of the server: who may come in, how many at once, and for how long.

Every request passes it, whatever its path, but for health and metrics: a path that means nothing to us may
mean much to a server behind. It also answers what nobody behind it has answered: an exception that escapes,
or a request that took too long.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from retinue.errors import DeadlineExceeded, EncoderUnavailable, Overloaded
from retinue.server.errors import error_response, refusal
from retinue.server.interruption import Interruption
from retinue.server.pace import Pace

__all__ = ["Door", "bears_one_of"]


class Door:
    """Lets requests through to ``app``.

    ``api_key``: what clients must send as a bearer token; None lets everybody in. ``ValueError`` for a key
    that no client could send: an empty one, or one with white space at an end.
    ``max_concurrent_requests``: more POSTs at once get 429 before they are read.
    ``request_timeout_s``: a request that is not being answered by then gets 504; None for no deadline.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_key: str | None = None,
        max_concurrent_requests: int = 256,
        request_timeout_s: float | None = 600.0,
    ) -> None:
        self._app = app
        self._keys = [] if api_key is None else [_key(api_key)]
        self._max_concurrent_requests = max_concurrent_requests
        self._request_timeout_s = request_timeout_s
        self._pace = Pace()
        self._ended_s = 0.0  # when a request ended last
        self._unanswered: set[Interruption] = set()
        self._is_shut = False
        self.in_flight = 0
        self.rejected = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI interface."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif self._keys and not bears_one_of(self._keys, scope):
            response = refusal(401, "the API key is missing or wrong", code="invalid_api_key")
            response.headers["WWW-Authenticate"] = "Bearer"
            await response(scope, receive, send)
        elif scope["method"] != "POST":
            await self._app(scope, receive, send)
        elif self.in_flight >= self._max_concurrent_requests:
            self.rejected += 1
            await error_response(self._full())(scope, receive, send)
        else:
            await self._through(scope, receive, send)

    def shut(self) -> None:
        """Answer 503 to all whose answer has not begun, and to who comes from now on."""
        self._is_shut = True
        for interruption in list(self._unanswered):
            interruption.interrupt()

    def _full(self) -> Overloaded:
        return Overloaded(
            f"{self.in_flight} requests are being answered, max_concurrent_requests="
            f"{self._max_concurrent_requests}",
            retry_after=self._pace.seconds_for(1),
        )

    async def _through(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = _Answer(send)
        self.in_flight += 1
        began_s = time.monotonic()
        try:
            await self._until_interrupted(answer, self._app(scope, receive, answer.send))
        except Exception as error:
            if answer.began:
                raise  # the server cuts the connection, so that the client sees that this is not the end
            await error_response(error)(scope, receive, send)
        finally:
            self.in_flight -= 1
            now_s = time.monotonic()
            self._pace.note(1, now_s - max(began_s, self._ended_s))
            self._ended_s = now_s

    async def _until_interrupted(self, answer: _Answer, work: Awaitable[None]) -> None:
        """Run ``work`` to its end, or to the deadline or the shutdown if its answer has not begun by then."""
        with Interruption() as interruption:
            self._unanswered.add(interruption)
            deadline = (
                None
                if self._request_timeout_s is None
                else asyncio.get_running_loop().call_later(self._request_timeout_s, interruption.interrupt)
            )

            def keep() -> None:
                self._unanswered.discard(interruption)
                if deadline is not None:
                    deadline.cancel()

            answer.keep = keep
            if self._is_shut:
                interruption.interrupt()
            try:
                return await work
            finally:
                keep()
        if self._is_shut:
            raise EncoderUnavailable("shut down before the request was answered")
        raise DeadlineExceeded(f"not answered within request_timeout_s={self._request_timeout_s:g}")


class _Answer:
    """Notices when the answer begins, from when on nothing may interrupt it: ``keep`` is called."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.began = False
        self.keep: Callable[[], None] | None = None

    async def send(self, message: Message) -> None:
        """``send`` of ASGI."""
        if message["type"] == "http.response.start":
            self.began = True
            if self.keep is not None:
                self.keep()
        await self._send(message)


def _key(text: str) -> bytes:
    """The bytes of a key; from the environment it may hold any, which Python writes as surrogates."""
    if not text or text != text.strip():
        raise ValueError("api_key is empty, or has white space at an end")  # without the key itself
    return text.encode("utf-8", "surrogateescape")


def bears_one_of(keys: Sequence[bytes], scope: Scope) -> bool:
    """Whether a request has one of ``keys`` as its bearer token."""
    given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    scheme, _, token = given.partition(b" ")
    if scheme.lower() != b"bearer":
        return False
    return any(hmac.compare_digest(token.strip(), key) for key in keys)
