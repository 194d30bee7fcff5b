"""HTTP/1.1 as uvicorn speaks it, with the bounds that it lacks.

uvicorn with httptools takes headers of any size for as long as they come, reads on for as long as a client
sends what nobody wants, and waits for ever for a client that does not take its answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from retinue.server.errors import refusal
from retinue.server.limits import ServerLimits

__all__ = ["bounded"]

_FIELD_BYTES = 32  # what a field counts besides its characters, as in RFC 9113, 6.5.2


def bounded(limits: ServerLimits) -> type[HttpToolsProtocol]:
    """The protocol of a server whose headers are at most ``max_header_bytes``.

    A client may keep it waiting for ``client_timeout_s``: for the whole of a request's headers, counted from
    the connection's or the last answer's end, what is left of a body that was refused included; and for
    room to write more of an answer.
    """
    return type("Bounded", (_Bounded,), {"limits": limits})


class _HeadTooLarge(Exception):
    """Ends the parser's work; uvicorn then sends its 400, which becomes our 431."""


class _Bounded(HttpToolsProtocol):
    limits: ClassVar[ServerLimits]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._in_head = True  # not between the end of headers and the end of their body
        self._turned = False  # whether the bytes at hand end a head, or a body
        self._fed = 0  # bytes that came of a head whose end has not
        self._head_size = 0  # as max_header_bytes counts
        self._head_too_large = False

    # -- how large ----------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Of ``asyncio.Protocol``."""
        self._turned = False
        super().data_received(data)
        if self._turned or not self._in_head or self.transport.is_closing():
            return
        self._fed += len(data)
        if self._fed > self.limits.max_header_bytes:  # a line without end, which the parser keeps to itself
            self._head_too_large = True
            self.send_400_response("")

    def on_message_begin(self) -> None:
        """Of httptools, as all that follow."""
        super().on_message_begin()
        self._head_size = 0

    def on_url(self, url: bytes) -> None:
        """A part of the first line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One whole header."""
        self._count(len(name) + len(value) + _FIELD_BYTES)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The headers have ended."""
        super().on_headers_complete()
        self._in_head, self._turned, self._fed = False, True, 0
        self._stop_waiting()

    def on_message_complete(self) -> None:
        """The body has ended."""
        super().on_message_complete()
        self._in_head = self._turned = True

    def _count(self, size: int) -> None:
        self._head_size += size
        if self._head_size > self.limits.max_header_bytes:
            self._head_too_large = True
            raise _HeadTooLarge

    # -- how long -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Of ``asyncio.Protocol``."""
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Of ``asyncio.Protocol``."""
        self._stop_waiting()
        self.resume_writing()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Of uvicorn: an answer is written, and the next request that has come is begun."""
        super().on_response_complete()
        if self.cycle.response_complete:
            self._wait_for_head()

    def pause_writing(self) -> None:
        """Of ``asyncio.Protocol``: the client takes less than there is."""
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self._later(self.transport.abort)

    def resume_writing(self) -> None:
        """Of ``asyncio.Protocol``."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _wait_for_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self._later(self._late)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _later(self, act: Callable[[], object]) -> asyncio.TimerHandle:
        return self.loop.call_later(self.limits.client_timeout_s, act)

    def _late(self) -> None:
        if self.transport.is_closing():  # but the client does not take what is left of the answer
            self.transport.abort()
        elif self._in_head and self._fed:
            bound = self.limits.client_timeout_s
            self._refuse(408, f"the headers did not end within client_timeout_s={bound:g}")
        else:  # it said nothing, or goes on with what was refused
            self.transport.close()

    # -- what is said -------------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        """Of uvicorn: the parser has given up."""
        if self._head_too_large:
            bound = self.limits.max_header_bytes
            self._refuse(431, f"the headers are larger than max_header_bytes={bound}")
        else:
            self._refuse(400, "what came is not HTTP")

    def _refuse(self, status: int, message: str) -> None:
        """Say so, unless it would stand in the midst of another answer, and close."""
        began = getattr(self.cycle, "response_started", False)  # there is none before the first request
        if self.pipeline or (began and not self.cycle.response_complete):
            self.transport.close()
            return
        response = refusal(status, message, code="bad_http")
        lines = [STATUS_LINE[status]]
        lines += [name + b": " + value + b"\r\n" for name, value in response.raw_headers]
        self.transport.write(b"".join([*lines, b"connection: close\r\n\r\n", response.body]))
        self.transport.close()
