"""BentoML, whose batching adapts by itself."""

from __future__ import annotations

import sys

import bentoml

from benchmarks.device import CAP, Device


@bentoml.service(workers=1, logging={"access": {"enabled": False}})
class Echo:
    """A batch through the device."""

    def __init__(self) -> None:
        self._device = Device()

    @bentoml.api(batchable=True, max_batch_size=CAP)  # type: ignore[untyped-decorator]  # it has none here
    def echo(self, items: list[int]) -> list[int]:
        """The items of a batch, to as many."""
        return self._device(items)


if __name__ == "__main__":
    bentoml.serve("benchmarks.endpoints.with_bentoml:Echo", port=int(sys.argv[1]), blocking=True)
