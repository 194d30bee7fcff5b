"""LitServe, over its fast queue."""

from __future__ import annotations

import sys
from typing import Any

import litserve

from benchmarks.device import CAP, Device


class Echo(litserve.LitAPI):  # type: ignore[misc]  # LitServe is in another environment
    """A batch through the device."""

    def setup(self, device: Any) -> None:
        """In the worker process."""
        self._simulated = Device()

    def batch(self, inputs: Any) -> Any:
        """Items stay a list."""
        return inputs

    def predict(self, x: Any) -> Any:
        """The items of a batch, to as many."""
        return self._simulated(x)

    def unbatch(self, output: Any) -> Any:
        """They are a list already."""
        return output


if __name__ == "__main__":
    port, wait_s = int(sys.argv[1]), float(sys.argv[2]) / 1e3
    api = Echo(max_batch_size=CAP, batch_timeout=wait_s, api_path="/echo")
    server = litserve.LitServer(api, accelerator="cpu", fast_queue=True)
    server.run(host="127.0.0.1", port=port, log_level="warning", generate_client_file=False, access_log=False)
