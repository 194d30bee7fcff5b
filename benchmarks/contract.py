"""Milliseconds to check one artifact, (576, 4096) in bfloat16, as an encoder checks what a backend returns.

    python -m benchmarks.contract [--rounds 15] [--threads N]

Contenders, interleaved in rounds within one process; each is given 32 artifacts, alone or in one call:
    alone, form             one a call, its form and storage only (``check_finite = False``)
    alone                   one a call, its values too
    batch, form             32 a call, form and storage only
    batch                   32 a call, values too
    batch of views, form    32 views of one tensor, which are copied
    batch of views          the same, values too
    isfinite().all()        of each artifact: what the check of values does not do
    float32, float16        arrays of numpy, 32 a call, values too
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.measure import interleaved, medians, save
from retinue.batching.outcome import Refused
from retinue.encoder.contract import ArtifactContract

_ARTIFACTS, _ROWS, _HIDDEN = 32, 576, 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, help="of torch; its own choice by default")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)

    batch = torch.randn(_ARTIFACTS, _ROWS, _HIDDEN).bfloat16()
    views = list(batch)
    own = [view.clone() for view in views]
    arrays = {name: [view.float().numpy().astype(name) for view in views] for name in ("float32", "float16")}
    contenders: dict[str, Callable[[], float]] = {
        "alone, form": lambda: _ms(own, 1, check_finite=False),
        "alone": lambda: _ms(own, 1),
        "batch, form": lambda: _ms(own, _ARTIFACTS, check_finite=False),
        "batch": lambda: _ms(own, _ARTIFACTS),
        "batch of views, form": lambda: _ms(views, _ARTIFACTS, check_finite=False),
        "batch of views": lambda: _ms(views, _ARTIFACTS),
        "isfinite().all()": lambda: _timed(lambda: [bool(each.isfinite().all()) for each in own]),
        "float32": lambda: _ms(arrays["float32"], _ARTIFACTS),
        "float16": lambda: _ms(arrays["float16"], _ARTIFACTS),
    }
    figures = interleaved(contenders, options.rounds)
    typical = medians(figures)
    for name, ms in typical.items():
        print(f"{name:21} {ms:8.4f} ms an artifact")
    report = {"threads": torch.get_num_threads(), "median_ms_per_artifact": typical, "rounds": figures}
    print("written to", save("contract", report, ("torch", "numpy")))


def _ms(artifacts: Sequence[Any], of_a_call: int, *, check_finite: bool = True) -> float:
    contract = ArtifactContract(hidden_size=_HIDDEN, check_finite=check_finite)  # it has seen none of them

    def check_all() -> list[Any]:
        results: list[Any] = []
        for start in range(0, _ARTIFACTS, of_a_call):
            results += contract.checked(artifacts[start : start + of_a_call])
        return results

    return _timed(check_all)


def _timed(check_all: Callable[[], list[Any]]) -> float:
    began = time.perf_counter()
    results = check_all()
    ms = (time.perf_counter() - began) * 1000 / _ARTIFACTS
    if any(type(result) is Refused or result is False for result in results):
        raise SystemExit("an artifact was refused")
    return ms


if __name__ == "__main__":
    main()
