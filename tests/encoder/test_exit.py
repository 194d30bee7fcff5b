"""A process with an encoder can always end."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time

import pytest

HEAD = """
import asyncio, os, sys, threading, warnings
from retinue import AsyncVisionEncoder, EncoderUnavailable, Preprocessed, VisionEncoderBackend

class Backend(VisionEncoderBackend):
    preprocess_concurrency = 2
    def build(self, model_id): print("built", flush=True)
    def preprocess(self, raw):
        if raw == "stuck":
            inside.set()
            threading.Event().wait()
        return Preprocessed(raw)
    def forward_batch(self, items, target_bucket=None): return items
    def close(self): print("closed", flush=True)

inside = threading.Event()
encoder = AsyncVisionEncoder(Backend(), "a model", join_timeout_s=0.5)
"""


def run(body: str) -> tuple[int, str, str, float]:
    """Exit status, output, errors and seconds of a program."""
    began_s = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", HEAD + textwrap.dedent(body)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return ended.returncode, ended.stdout, ended.stderr, time.monotonic() - began_s


STUCK = """
    async def main():
        await encoder.aload("a model")
        request = asyncio.create_task(encoder.encode(["stuck"]))
        await asyncio.to_thread(inside.wait)
        request.cancel()
"""


@pytest.mark.parametrize(
    "end",
    [
        "",
        "        await encoder.aclose()\n",
        "        encoder.shutdown()\n",
        "        encoder.shutdown(wait=False)\n",
    ],
    ids=["forgotten", "aclose", "shutdown", "shutdown without waiting"],
)
def test_a_preprocess_that_is_stuck_keeps_no_process_from_ending(end: str) -> None:
    status, out, errors, seconds = run(STUCK + end + "    asyncio.run(main())")
    assert (status, out) == (0, "built\nclosed\n"), errors
    assert "still runs" in errors
    assert "Traceback" not in errors
    assert seconds < 10


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("encoder.load('a model')", 0),
        ("encoder.load('a model'); sys.exit(7)", 7),
        ("encoder.load('a model'); asyncio.run(encoder.encode(['image']))", 0),
    ],
    ids=["unused", "sys.exit", "used"],
)
def test_an_encoder_that_nobody_shut_down_is_closed_at_exit(body: str, status: int) -> None:
    assert run(body)[:3] == (status, "built\nclosed\n", "")


def test_an_uncaught_error_ends_the_process_and_closes_the_encoder() -> None:
    status, out, errors, _ = run("encoder.load('a model'); 1 / 0")
    assert (status, out) == (1, "built\nclosed\n")
    assert errors.strip().endswith("ZeroDivisionError: division by zero")


def test_a_forked_child_is_refused_and_can_exit() -> None:
    status, out, errors, _ = run(
        """
        encoder.load("a model")
        warnings.simplefilter("ignore")  # Python 3.12 warns of a fork beside threads, which is the case
        child = os.fork()
        if not child:
            try:
                asyncio.run(asyncio.wait_for(encoder.encode(["image"]), 10))
            except EncoderUnavailable:
                print("refused", flush=True)
            sys.exit(5)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        print(asyncio.run(encoder.encode(["image"])), flush=True)
        encoder.shutdown()
        """
    )
    assert (status, out, errors) == (0, "built\nrefused\n5\n['image']\nclosed\n", "")
