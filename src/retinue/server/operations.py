"""What operators and orchestrators ask: ``/health``, ``/ready``, ``/metrics``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import orjson
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from retinue.server.errors import refusal
from retinue.server.readiness import Readiness

__all__ = ["Operations", "json_response"]


class Operations:
    """Answers these three paths, and gives all others on to ``app``; no API key is asked for them."""

    def __init__(self, app: ASGIApp, *, readiness: Readiness, metrics: Callable[[], bytes]) -> None:
        self._app = app
        self._readiness = readiness
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI interface."""
        answer = self._answers.get(scope["path"]) if scope["type"] == "http" else None
        if answer is None:
            await self._app(scope, receive, send)
        elif scope["method"] not in ("GET", "HEAD"):
            message = f"{scope['path']} takes GET, not {scope['method']}"
            await refusal(405, message, code="method_not_allowed")(scope, receive, send)
        else:
            await (await answer(self))(scope, receive, send)

    async def _health(self) -> Response:
        """The process lives, and its event loop turns."""
        return json_response(200, {"status": "ok"})

    async def _ready(self) -> Response:
        report = await self._readiness.report()
        return json_response(200 if report.ready else 503, asdict(report))

    async def _figures(self) -> Response:
        return Response(self._metrics(), media_type=CONTENT_TYPE_LATEST)

    _answers = {"/health": _health, "/ready": _ready, "/metrics": _figures}  # noqa: RUF012  # never changed


def json_response(status: int, body: object) -> Response:
    """A response with ``body`` as JSON."""
    return Response(orjson.dumps(body), status, media_type="application/json")
