"""Closed loops on the simulated device (``device``): batchers within one process, and servers over HTTP.

    python -m benchmarks.peers [--rounds 5] [--http-rounds 2] [--peers FOLDER] [--servers PYTHON]

In one process (``in_process``) callers ask again as soon as they are answered, for one item at a time; on the
device, and on a function that returns at once. Over HTTP (``endpoints``) 64 clients, in a process of their
own, do the same with the same small endpoint by each server. A server is started anew in each round, so that
no other runs beside it. Those that wait for company for a time that their user sets are here with what their
documentation has and with the shortest wait that they take; all else is as their documentation has it for
throughput.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.device import CAP, Device, NoDevice
from benchmarks.in_process import PEERS, Contender, contenders
from benchmarks.latency import Round, compare
from benchmarks.measure import save

SERVERS = Path(".venv-bench/bin/python")  # where ``make bench`` puts the servers
_CLIENTS = 64
_WARM_UP, _TURNS = 10, 25  # of each client
_START_S = 120.0
_CASES = {  # the device, callers, turns of each
    "device, 1 caller": (Device, 1, 50),
    "device, 16 callers": (Device, 16, 40),
    "device, 64 callers": (Device, 64, 30),
    "no device, 64 callers": (NoDevice, 64, 60),
}


class Server(NamedTuple):
    """An endpoint: its program's name and arguments, the body that asks it for one item."""

    program: str
    arguments: tuple[str, ...] = ()
    body: str = "7"


_SERVERS = {
    "retinue": Server("retinue"),
    "mosec, 10 ms": Server("mosec", ("10",)),
    "mosec, 1 ms": Server("mosec", ("1",)),
    "LitServe, 10 ms": Server("litserve", ("10",)),
    "LitServe, 0 ms": Server("litserve", ("0",)),
    "BentoML": Server("bentoml", body='{"items": [7]}'),
    "Ray Serve, 10 ms": Server("ray", ("10",)),
    "Ray Serve, 0 ms": Server("ray", ("0",)),
}
_SERVED_BY = ("starlette", "uvicorn", "mosec", "litserve", "bentoml", "ray")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--http-rounds", type=int, default=2)
    parser.add_argument("--peers", type=Path, default=PEERS, help="folder with the peers' packages")
    parser.add_argument("--servers", type=Path, default=SERVERS, help="Python with the servers' packages")
    options = parser.parse_args()

    known, report = contenders(options.peers), {}
    for case, (device, callers, turns) in _CASES.items():
        print(case)
        report[case] = compare(
            {name: partial(_in_process, one, device, callers, turns) for name, one in known.items()},
            options.rounds,
        )
    print(f"HTTP, {_CLIENTS} clients")
    report[f"HTTP, {_CLIENTS} clients"] = compare(
        {name: partial(_over_http, options.servers, one) for name, one in _SERVERS.items()},
        options.http_rounds,
    )
    results = {"cases": report, "servers": _versions(options.servers)}
    print("written to", save("peers", results, ("ai-dynamo", "batched", "async-batcher")))


def _in_process(contender: Contender, device: type[Device], callers: int, turns: int, _: int) -> Round:
    return asyncio.run(_closed_loop(contender, device(), callers, turns))


async def _closed_loop(contender: Contender, device: Device, callers: int, turns: int) -> Round:
    latencies_s: list[float] = []

    async def caller(turns: int) -> None:
        for turn in range(turns):
            began_s = time.perf_counter()
            await submit(turn)
            latencies_s.append(time.perf_counter() - began_s)

    async def all_callers(turns: int) -> float:
        began_s = time.perf_counter()
        await asyncio.gather(*(caller(turns) for _ in range(callers)))
        return time.perf_counter() - began_s

    async with contender(device, CAP) as submit:
        await all_callers(turns // 4)
        latencies_s.clear()
        device.calls = device.items = 0
        seconds = await all_callers(turns)
    return Round.of(latencies_s, seconds, device.items / device.calls)


def _over_http(python: Path, server: Server, _: int) -> Round:
    with _running(python, server) as url:
        command = [sys.executable, "-m", "benchmarks.clients", url, server.body, str(_CLIENTS)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as clients:
            assert clients.stdin is not None
            assert clients.stdout is not None
            for turns in (_WARM_UP, _TURNS):
                clients.stdin.write(f"{turns}\n")
                clients.stdin.flush()
                latencies_s, seconds = json.loads(clients.stdout.readline())
            clients.stdin.close()
    return Round.of(latencies_s, seconds)


@contextlib.contextmanager
def _running(python: Path, server: Server) -> Iterator[str]:
    """The endpoint's URL, once it answers; its processes are gone afterwards."""
    port = _free_port()
    url = f"http://127.0.0.1:{port}/echo"
    program = [str(python), "-m", f"benchmarks.endpoints.with_{server.program}", str(port), *server.arguments]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(program, stdout=log, stderr=log, start_new_session=True)
        try:
            give_up_s = time.monotonic() + _START_S
            while not _answers(url, server.body):
                if process.poll() is not None or time.monotonic() > give_up_s:
                    log.seek(0)
                    raise SystemExit(f"{' '.join(program)} does not answer:\n{log.read()}")
                time.sleep(0.1)
            yield url
        finally:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # whoever is left of it
            process.wait()


def _answers(url: str, body: str) -> bool:
    request = urllib.request.Request(url, body.encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer) in (7, [7])
    except OSError:  # not there yet, or answers that it is not ready
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _versions(python: Path) -> Any:
    code = (
        f"import importlib.metadata as m, json; print(json.dumps({{p: m.version(p) for p in {_SERVED_BY}}}))"
    )
    return json.loads(subprocess.check_output([python, "-c", code]))


if __name__ == "__main__":
    main()
