"""A server as a process of its own, whose backend says on stdout what it does and does it when stdin says so.

``python program.py GRACE_S [stuck] [slow-build] [broken-build] [port=N]``
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from starlette.types import Receive, Scope, Send

from retinue.encoder import VisionEncoderBackend
from retinue.server.serving import serve
from retinue.server.stack import Behind, Stack

FLAGS = sys.argv[2:]


def say(what: str) -> None:
    print(what, flush=True)


class Told(VisionEncoderBackend[Any, Any, Any]):
    """Each forward waits for a line on stdin."""

    def build(self, model_id: str) -> None:
        say("building")
        if "slow-build" in FLAGS:
            sys.stdin.readline()
        if "broken-build" in FLAGS:
            raise OSError("no weights")

    def forward_batch(self, items: Sequence[Any], target_bucket: int | None = None) -> list[Any]:
        import torch

        say("forward")
        while not sys.stdin.readline() or "stuck" in FLAGS:
            pass
        return [torch.zeros(1, 4) for _ in items]

    def close(self) -> None:
        say("closed")


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Says that it is there."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


if __name__ == "__main__":
    port = next((int(flag[5:]) for flag in FLAGS if flag.startswith("port=")), 0)
    stack = Stack(Told(), "none", Behind(app), join_timeout_s=float(sys.argv[1]))
    sys.exit(serve(stack, "program", host="127.0.0.1", port=port, grace_s=float(sys.argv[1])))
