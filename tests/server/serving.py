"""An ASGI app behind a real socket, for as long as a test needs it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["LIMIT_S", "Served", "happened", "serving"]

LIMIT_S = 20.0  # a wait that takes longer is a failure


async def happened(event: threading.Event) -> None:
    """Wait for another thread's ``event``."""
    assert await asyncio.to_thread(event.wait, LIMIT_S)


class Served:
    """A running server: where it is, and what its app does."""

    def __init__(self, app: ASGIApp, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.escaped: list[BaseException] = []
        self.tasks_at_end = 0
        self._app = app
        self._ended = threading.Semaphore(0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except BaseException as error:
            self.escaped.append(error)
            raise
        finally:
            if scope["type"] == "http":
                self._ended.release()
            else:  # the lifespan: nothing of a request is left, but for uvicorn's own task and its main one
                self.tasks_at_end = len(asyncio.all_tasks())

    async def a_request_ended(self) -> None:
        """Wait until the app is done with one more request, answered or not."""
        assert await asyncio.to_thread(self._ended.acquire, timeout=LIMIT_S)


@contextmanager
def serving(app: ASGIApp) -> Iterator[Served]:
    """Serve ``app`` on a free port of the loopback interface, on a thread and a loop of its own.

    An error that leaves the app, a task that a request leaves behind, or a server that does not end is a
    failure.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:  # it listens before anybody could connect
        served = Served(app, listener.getsockname()[1])
        config = uvicorn.Config(
            served, interface="asgi3", http="httptools", ws="none", lifespan="on", log_config=None
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="server")
        thread.start()
        try:
            yield served
        finally:
            server.should_exit = True
            thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert served.escaped == []
    assert served.tasks_at_end <= 2
