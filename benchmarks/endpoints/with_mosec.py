"""Mosec: a server in Rust before a worker process of Python."""

from __future__ import annotations

import os
import sys
from typing import Any

from mosec import Server, Worker

from benchmarks.device import CAP, Device


class Echo(Worker):  # type: ignore[misc]  # mosec is in another environment
    """A batch through the device."""

    def __init__(self) -> None:
        super().__init__()
        self._device = Device()

    def forward(self, data: Any) -> Any:
        """The items of a batch, to as many."""
        return self._device(data)


if __name__ == "__main__":
    port, wait_ms = sys.argv.pop(1), sys.argv.pop(1)
    os.environ |= {"MOSEC_PORT": port, "MOSEC_LOG_LEVEL": "warning"}
    server = Server()
    server.append_worker(Echo, max_batch_size=CAP, max_wait_time=int(wait_ms), route="/echo")
    server.run()
