"""Requests of all outcomes, by the hundred thousand, on real threads: nothing of them is retained.

    python -m tests.chaos.hygiene [--requests 1000000] [--seed 1] [--json FILE]

One batcher and one encoder live through it all. In each round fresh event loops, in threads of their own, ask
of them what the seed says, and end. Then every input, item and result must be dead, although some callers
have kept their exceptions.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import json
import logging
import random
import statistics
import sys
import threading
import time
import warnings
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from retinue import (
    AsyncVisionEncoder,
    BackendLost,
    DeadlineExceeded,
    EncoderUnavailable,
    InvalidInput,
    Preprocessed,
    VisionEncoderBackend,
)
from retinue.batching import ThreadedMicroBatcher
from retinue.errors import RetinueError

__all__ = ["Findings", "run"]

Submit: TypeAlias = "Callable[[list[Thing]], Coroutine[Any, Any, list[Thing]]]"

_LOOPS = 2  # of each subject, in each round
_BURST = 100  # requests of one loop at once
_BURSTS = 10  # in each round
_KEPT = 0.05  # share of the errors that callers keep
_MAX_COST = 16
_MAX_PENDING_COST = 320  # which bursts overrun now and then
_STUCK_S = 0.3
_LEAVING_S = 5.0  # a thread that has been told to end has ended by then
_OPTIONS: Mapping[str, Any] = MappingProxyType(
    {
        "max_pending_cost": _MAX_PENDING_COST,
        "forward_timeout_s": _STUCK_S / 2,
        "max_rebuilds": 10**6,
        "rebuild_window_s": 1.0,
    }
)

#: What a process may grow by, however many requests: some of Python's free lists fill slowly.
MAX_BLOCKS_GROWN = 1000
MAX_BYTES_GROWN = 4 * 2**20


class Thing:
    """An input, an item or a result, which can be seen to be dead; ``fault`` is what it does in a call."""

    __slots__ = ("__weakref__", "fault")
    made: list[weakref.ref[Thing]] = []  # noqa: RUF012  # of all threads, since they were last counted

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        Thing.made.append(weakref.ref(self))

    @classmethod
    def taken(cls) -> list[weakref.ref[Thing]]:
        """All that were made since the last time."""
        made, cls.made = cls.made, []
        return made


def _stop() -> None:
    next(iter(()))


def _exit() -> None:
    raise SystemExit(3)


def _fail(error: type[Exception]) -> Callable[[], None]:
    def fail() -> None:
        raise error("no")

    return fail


#: What a thing does to the call that it is in.
IN_A_CALL: Mapping[str, Callable[[], None]] = MappingProxyType(
    {
        "raise": _fail(RuntimeError),
        "stop": _stop,
        "exit": _exit,
        "memory": _fail(MemoryError),
        "lost": _fail(BackendLost),
        "stuck": partial(time.sleep, _STUCK_S),
    }
)
#: What it does in preprocess.
IN_PREPROCESS: Mapping[str, Callable[[], None]] = MappingProxyType(
    {"invalid": _fail(InvalidInput), "value": _fail(ValueError), "key": _fail(KeyError), "stop early": _stop}
)


def forward(items: Sequence[Thing], target_bucket: int | None = None) -> list[Thing]:
    """A result for each item, unless one of them says otherwise."""
    for item in items:
        if item.fault in IN_A_CALL:
            IN_A_CALL[item.fault]()
        elif item.fault == "greedy" and len(items) > 1:
            raise MemoryError
    results = [Thing() for _ in items]
    return results[1:] if any(item.fault == "short" for item in items) else results


class Backend(VisionEncoderBackend[Thing, Thing, Thing]):
    """``forward`` behind a preprocess that makes new things."""

    max_batch_cost = _MAX_COST
    preprocess_concurrency = 2

    def build(self, model_id: str) -> None:
        """Nothing to build."""

    def preprocess(self, raw: Thing) -> Preprocessed[Thing]:
        """An item with the raw's fault."""
        if raw.fault in IN_PREPROCESS:
            IN_PREPROCESS[raw.fault]()
        cost = {"no cost": 0, "too large": _MAX_COST + 1}.get(raw.fault, 1)
        return Preprocessed(Thing(raw.fault), cost, [] if raw.fault == "no key" else None)  # type: ignore[arg-type]  # the case

    def forward_batch(self, items: list[Thing], target_bucket: int | None = None) -> list[Thing]:
        """``forward``."""
        return forward(items)


@dataclass
class Findings:
    """What a run found. ``blocks`` and ``resident_bytes`` are of the process, after each round."""

    seed: str
    requests: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    survivors: int = 0
    threads: list[str] = field(default_factory=list)  # that were not there before
    complaints: list[str] = field(default_factory=list)  # of event loops, futures and the interpreter
    blocks: array[int] = field(default_factory=lambda: array("q"))  # which takes none itself
    resident_bytes: array[int] = field(default_factory=lambda: array("q"))

    @property
    def blocks_grown(self) -> int:
        """How many more blocks of memory Python holds at the end than after a warm-up of a quarter."""
        return _growth(self.blocks)

    @property
    def bytes_grown(self) -> int:
        """How much more memory the process has at the end than after a warm-up of a quarter."""
        return _growth(self.resident_bytes)

    def figures(self) -> dict[str, Any]:
        """For a table."""
        return {
            "seed": self.seed,
            "requests": self.requests,
            "seconds": round(self.seconds, 1),
            "outcomes": dict(sorted(self.outcomes.items())),
            "blocks_grown": self.blocks_grown,
            "bytes_grown": self.bytes_grown,
            "retained": self.retained(),
        }

    def retained(self) -> list[str]:
        """What requests have left behind, in words; nothing, if all is as it should be."""
        return [
            *([f"{self.survivors} inputs, items or results"] if self.survivors else []),
            *([f"{self.blocks_grown} blocks"] if self.blocks_grown > MAX_BLOCKS_GROWN else []),
            *([f"{self.bytes_grown} bytes"] if self.bytes_grown > MAX_BYTES_GROWN else []),
            *(f"thread {name}" for name in self.threads),
            *self.complaints,
        ]


def _growth(series: Sequence[int]) -> int:
    """From the second quarter of ``series`` to its last, by their medians."""
    quarter = max(1, len(series) // 4)
    return int(statistics.median(series[-quarter:]) - statistics.median(series[quarter : 2 * quarter]))


# -- requests ------------------------------------------------------------------------------------------


async def stays(submit: Submit, rng: random.Random, fault: str) -> None:
    """One to three things, of which one may have a fault."""
    await submit([Thing(fault), *(Thing() for _ in range(rng.randrange(3)))])


async def leaves(submit: Submit, rng: random.Random, fault: str) -> None:
    """Is cancelled after so many turns of the event loop; or has its answer by then."""
    task = asyncio.ensure_future(stays(submit, rng, fault))
    task.add_done_callback(_see)
    for _ in range(rng.randrange(8)):
        await asyncio.sleep(0)
    task.cancel()
    await task


def _see(task: asyncio.Task[None]) -> None:
    """Look at its error, which is nobody's if the loop ends now."""
    if not task.cancelled():
        task.exception()


async def is_late(submit: Submit, rng: random.Random, fault: str) -> None:
    """Has no time."""
    await asyncio.wait_for(stays(submit, rng, fault), 0.0002)


async def is_dropped(submit: Submit, rng: random.Random, fault: str) -> None:
    """A coroutine that somebody begins and forgets."""
    coroutine = submit([Thing(fault), Thing()])
    coroutine.send(None)
    await asyncio.sleep(0)
    del coroutine
    raise asyncio.CancelledError  # as it is to the request


Manner: TypeAlias = "Callable[[Submit, random.Random, str], Coroutine[Any, Any, None]]"

#: How callers behave, and how often.
MANNERS: Mapping[Manner, int] = MappingProxyType({stays: 84, leaves: 10, is_late: 3, is_dropped: 3})
#: What they bring, and how often; what the batcher does not know is no fault to it.
FAULTS: Mapping[str, float] = MappingProxyType(
    {"": 180, "stuck": 0.02, "lost": 0.2}
    | dict.fromkeys(["raise", "stop", "exit", "memory", "greedy", "short"], 1)
    | dict.fromkeys(["invalid", "value", "key", "stop early", "no cost", "no key", "too large"], 1)
)


class Round:
    """Requests of one subject on one event loop, which ends with some of them under way."""

    def __init__(self, submit: Submit, seed: str, kept: list[BaseException]) -> None:
        self.outcomes: Counter[str] = Counter()
        self._submit = submit
        self._rng = random.Random(seed)
        self._kept = kept

    def run(self) -> None:
        """On a thread of its own."""
        asyncio.run(self._run())

    async def _run(self) -> None:
        for _ in range(_BURSTS):
            await asyncio.gather(*(self._one() for _ in range(_BURST)))
        unfinished = [asyncio.ensure_future(self._one()) for _ in range(_BURST // 10)]
        await asyncio.sleep(0)
        del unfinished  # asyncio.run cancels what is left

    async def _one(self) -> None:
        rng = self._rng
        manner = rng.choices([*MANNERS], [*MANNERS.values()])[0]
        fault = rng.choices([*FAULTS], [*FAULTS.values()])[0]
        outcome = "ok"
        try:
            await manner(self._submit, rng, fault)
        except (RetinueError, asyncio.TimeoutError, asyncio.CancelledError) as error:
            outcome = type(error).__name__
            if rng.random() < _KEPT:
                self._kept.append(error)
        self.outcomes[outcome] += 1


def of_the_batcher(batcher: ThreadedMicroBatcher[Thing, Thing]) -> Submit:
    """``submit``; the thing that is too large, and its like, say so here, where there is no preprocess."""

    async def submit(things: list[Thing]) -> list[Thing]:
        first = things[0].fault
        costs = [{"no cost": 0, "too large": _MAX_COST + 1}.get(first, 1), *[1] * (len(things) - 1)]
        keys: list[Any] = [[] if first == "no key" else None] * len(things)
        try:
            return await batcher.submit(things, costs, keys)
        finally:
            del things

    return submit


def ended_early(requests: int) -> Counter[str]:
    """A batcher that is shut down while all but the first of these requests wait, and then asked again."""
    inside, let = threading.Event(), threading.Event()

    def fn(items: list[Thing]) -> list[Thing]:
        inside.set()
        let.wait()
        return forward(items)

    async def one(batcher: ThreadedMicroBatcher[Thing, Thing]) -> str:
        try:
            await batcher.submit([Thing()])
        except EncoderUnavailable as error:
            return type(error).__name__
        return "ok"

    async def main() -> list[str]:
        batcher: ThreadedMicroBatcher[Thing, Thing] = ThreadedMicroBatcher(fn)
        await batcher.astart()
        first = asyncio.ensure_future(one(batcher))
        await asyncio.to_thread(inside.wait)
        rest = [asyncio.ensure_future(one(batcher)) for _ in range(requests - 2)]
        await asyncio.sleep(0)
        batcher.shutdown(wait=False)
        let.set()
        late = await one(batcher)
        await batcher.aclose()
        return [late, *await asyncio.gather(first, *rest)]

    return Counter(asyncio.run(main()))


# -- the whole -----------------------------------------------------------------------------------------


def run(requests: int, seed: str) -> Findings:
    """At least so many requests, in rounds."""
    findings = Findings(seed)
    began_s = time.monotonic()
    before = set(threading.enumerate())
    with _listening(findings.complaints):
        batcher: ThreadedMicroBatcher[Thing, Thing] = ThreadedMicroBatcher(
            forward, max_batch_cost=_MAX_COST, **_OPTIONS
        )
        encoder = AsyncVisionEncoder(Backend(), **_OPTIONS)
        batcher.start()
        encoder.load("none")
        subjects: list[Submit] = [of_the_batcher(batcher), encoder.encode]
        for number in itertools.count():
            if findings.requests >= requests:
                break
            _round(findings, subjects, f"{seed}/{number}")
        batcher.shutdown()
        encoder.shutdown()
        gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(_LEAVING_S)
        if thread.is_alive():
            findings.threads.append(thread.name)
    findings.seconds = time.monotonic() - began_s
    return findings


def _round(findings: Findings, subjects: Sequence[Submit], seed: str) -> None:
    kept: list[BaseException] = []
    rounds = [
        Round(submit, f"{seed}/{number}", kept)
        for number, submit in enumerate(
            itertools.chain.from_iterable([subject] * _LOOPS for subject in subjects)
        )
    ]
    with ThreadPoolExecutor(len(rounds)) as threads:
        for done in [threads.submit(one.run) for one in rounds]:
            done.result()
    outcomes = sum((one.outcomes for one in rounds), ended_early(20))
    findings.outcomes += outcomes
    findings.requests += outcomes.total()
    made = Thing.taken()
    asyncio.run(_serve_once(subjects))
    gc.collect()
    findings.survivors += sum(thing() is not None for thing in made)
    del made
    kept.clear()
    gc.collect()
    findings.blocks.append(sys.getallocatedblocks())
    findings.resident_bytes.append(_resident_bytes())


async def _serve_once(subjects: Sequence[Submit]) -> None:
    """Give each subject's threads something else to hold than the last batch."""
    for submit in subjects:
        while True:
            try:
                await submit([Thing()])
                break
            except (EncoderUnavailable, DeadlineExceeded):  # a call is stuck
                await asyncio.sleep(_STUCK_S / 10)


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096


@contextlib.contextmanager
def _listening(complaints: list[str]) -> Iterator[None]:
    """Hear what event loops, futures and the interpreter complain of.

    The package's own log is silenced: each failed call is in it, and a handler may keep what it reports.
    """

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            complaints.append(f"{record.name}: {record.getMessage()}")

    def unraisable(args: Any) -> None:
        complaints.append(f"{args.err_msg or 'Exception ignored in'} {args.object!r}: {args.exc_value!r}")

    def ended(args: Any) -> None:
        complaints.append(f"thread {args.thread}: {args.exc_value!r}")

    ear, ours = Ear(logging.WARNING), logging.getLogger("retinue")
    before = sys.unraisablehook, threading.excepthook, ours.disabled
    sys.unraisablehook, threading.excepthook, ours.disabled = unraisable, ended, True
    logging.getLogger().addHandler(ear)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # "never awaited" becomes unraisable
            yield
    finally:
        logging.getLogger().removeHandler(ear)
        sys.unraisablehook, threading.excepthook, ours.disabled = before


def main() -> int:
    """Run it all and say what was found; 1 if anything was retained."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--seed", default=str(random.randrange(10**6)))
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    findings = run(options.requests, options.seed)
    retained = findings.retained()
    print(
        f"seed {findings.seed}: {findings.requests} requests in {findings.seconds:.0f} s\n"
        f"  {dict(findings.outcomes)}\n"
        f"  grown by {findings.blocks_grown} blocks, {findings.bytes_grown / 1024:.0f} KiB\n"
        f"  retained: {retained[:20] or 'nothing'}"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(findings.figures(), indent=2) + "\n")
    return 1 if retained else 0


if __name__ == "__main__":
    sys.exit(main())
