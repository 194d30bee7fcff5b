"""Faults that others' servers had in the field, as tests of the library; tests/server has those over HTTP.

Each section names its cases, and each test the right behavior. Where a case's variants are pinned beside the
part that keeps the promise, only those that are not are here.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import re
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
import pytest

from retinue import (
    AsyncVisionEncoder,
    EncoderFailed,
    EncoderUnavailable,
    InvalidInput,
    Preprocessed,
    RetinueError,
)
from retinue.batching import BatchRecord

from .batching.test_exit import is_the_scripts_own, run
from .encoder.support import LIMIT_S, Bare, Gate, Probe, ended, queued, refusing, seen

Encoder: TypeAlias = AsyncVisionEncoder[Any, Any, Any]
THREADS = "field case;"


@pytest.fixture(autouse=True)
def nothing_is_left(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Neither a thread nor a complaint of an event loop, of a callback or an error never retrieved."""
    before = set(threading.enumerate())
    with caplog.at_level(logging.WARNING, "asyncio"):
        yield
        gc.collect()
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert not {name for name in left if not name.startswith("asyncio_")}  # those are the test's own loop's
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


@asynccontextmanager
async def parked(backend: Bare, gate: Gate, **options: Any) -> AsyncIterator[Encoder]:
    """An encoder whose first forward, which must pass ``gate``, is inside; in the end it serves as ever."""
    async with AsyncVisionEncoder(backend, "a model", name=THREADS, **options) as encoder:
        first = asyncio.create_task(encoder.encode(["first"]))
        try:
            await gate.reached()
            yield encoder
        finally:
            gate.open()
        assert await within_limit(first) == seen("first")
        assert await within_limit(encoder.encode(["as ever"])) == seen("as ever")
        pending = encoder.pending()
        assert (pending.items, pending.cost) == (0, 0)


async def within_limit(awaitable: Any) -> Any:
    return await asyncio.wait_for(awaitable, LIMIT_S)


async def outcomes_of(callers: list[asyncio.Task[Any]]) -> list[Any]:
    """What each returned or raised."""
    return await within_limit(asyncio.gather(*callers, return_exceptions=True))  # type: ignore[no-any-return]


# -- one request's fault is not its batch-mates' (FC-03) -----------------------------------------------

ONE_OF_FOUR = (["1"], ["2", "bad", "too"], ["3"], ["4"])


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidInput("cut short"), InvalidInput),
        (ValueError("cut short"), InvalidInput),
        (OSError("cut short"), EncoderFailed),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
async def test_an_image_that_cannot_be_prepared_fails_its_request_alone_and_as_a_whole(
    error: Exception, kind: type[RetinueError]
) -> None:
    def preprocess(raw: str) -> Preprocessed[str]:
        if raw == "bad":
            raise error
        return Preprocessed(raw)

    gate = Gate()
    backend = Probe(refusing(preprocess), forward=gate)
    async with parked(backend, gate) as encoder:
        callers = [asyncio.create_task(encoder.encode(raws)) for raws in ONE_OF_FOUR]
        await queued(encoder)
        gate.open()
        one, two, three, four = await outcomes_of(callers)
    assert [one, three, four] == [seen("1"), seen("3"), seen("4")]
    assert type(two) is kind
    assert "image 2 of 3" in str(two)
    assert backend.batches == [["first"], ["1", "3", "4"], ["as ever"]]


async def test_an_image_that_fails_in_the_batch_fails_its_request_alone_and_as_a_whole() -> None:
    fault = RuntimeError("no such shape")

    def forward(items: list[str]) -> None:
        gate()
        if "bad" in items:
            raise fault

    gate = Gate()
    backend = Probe(refusing(Preprocessed), forward=forward)
    async with parked(backend, gate) as encoder:
        callers = [asyncio.create_task(encoder.encode(raws)) for raws in ONE_OF_FOUR]
        await queued(encoder)
        gate.open()
        one, two, three, four = await outcomes_of(callers)
    assert [one, three, four] == [seen("1"), seen("3"), seen("4")]
    assert type(two) is EncoderFailed
    assert "image 2 of 3" in str(two)
    assert two.__cause__ is fault
    assert backend.batches[1] == ["1", "2", "bad", "too", "3", "4"]


# -- a wrong number, or a wrong kind, of results (FC-05) -----------------------------------------------


class Answering(Bare):
    """Returns what ``answer`` makes of the items, once the first forward is over."""

    def __init__(self, answer: Callable[[list[Any]], Any], gate: Gate) -> None:
        super().__init__(forward=gate)
        self.answer = answer

    def forward_batch(self, items: list[Any], target_bucket: int | None = None) -> Any:
        artifacts = super().forward_batch(items)
        return artifacts if isinstance(items[0], str) else self.answer(items)


def pixels(number: int) -> np.ndarray[Any, Any]:
    return np.full((2, 3), float(number))


def wrapped(number: int) -> dict[str, Any]:
    """Neither hashable nor comparable: its ``==`` gives an array, which is neither true nor false."""
    return {"pixels": pixels(number)}


def pixels_of(item: Any) -> Any:
    return item["pixels"] if isinstance(item, dict) else item


async def answers(answer: Callable[[list[Any]], Any], item: Callable[[int], Any]) -> tuple[list[Any], Any]:
    """How three requests of one batch ended, and one more after the backend was mended."""
    gate = Gate()
    backend = Answering(answer, gate)
    async with parked(backend, gate) as encoder:
        callers = [asyncio.create_task(encoder.encode([item(number)])) for number in range(3)]
        await asyncio.sleep(0)  # each takes its first step, into the queue
        gate.open()
        outcomes = await outcomes_of(callers)
        assert len(backend.batches[1]) == 3
        backend.answer = list
        return outcomes, await within_limit(encoder.encode([item(9)]))


REFUSED: dict[str, Callable[[list[Any]], Any]] = {
    "too few": lambda items: items[1:],
    "too many": lambda items: [*items, items[0]],
    "none": lambda items: [],
    "None": lambda items: None,
    "dict": lambda items: dict(enumerate(items)),
    "set": lambda items: set(range(len(items))),
    "str": lambda items: "a" * len(items),
    "generator": lambda items: (item for item in items),
}


@pytest.mark.parametrize("item", [pixels, wrapped])
@pytest.mark.parametrize("answer", REFUSED.values(), ids=REFUSED.keys())
async def test_what_is_not_one_result_per_item_is_refused_with_expected_and_got(
    answer: Callable[[list[Any]], Any], item: Callable[[int], Any], caplog: pytest.LogCaptureFixture
) -> None:
    errors, after = await answers(answer, item)
    assert [type(error) for error in errors] == [EncoderFailed] * 3
    assert all(re.search("one result per item: expected .*, got", str(error)) for error in errors)
    assert len(set(map(id, errors))) == 3
    assert (pixels_of(after[0]) == pixels(9)).all()
    assert not re.search("truth value|unhashable", caplog.text)


ACCEPTED: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "stacked": lambda items: np.stack([pixels_of(item) for item in items]),
}


@pytest.mark.parametrize("item", [pixels, wrapped])
@pytest.mark.parametrize("answer", ACCEPTED.values(), ids=ACCEPTED.keys())
async def test_a_tuple_and_a_stacked_array_are_results_in_the_order_of_the_items(
    answer: Callable[[list[Any]], Any], item: Callable[[int], Any]
) -> None:
    results, _ = await answers(answer, item)
    for number, (artifact,) in enumerate(results):
        assert (pixels_of(artifact) == pixels(number)).all()


@pytest.mark.parametrize("item", [pixels, wrapped])
async def test_a_none_among_the_results_is_its_own_callers_artifact(item: Callable[[int], Any]) -> None:
    (one, two, three), _ = await answers(lambda items: [items[0], None, items[2]], item)
    assert two == [None]
    assert (pixels_of(one[0]) == pixels(0)).all()
    assert (pixels_of(three[0]) == pixels(2)).all()


# -- what no future can carry (FC-06, FC-07) -----------------------------------------------------------


def exhaust(*_: object) -> NoReturn:
    next(iter([]))
    raise AssertionError("there was a next")


async def test_a_build_that_runs_out_of_an_iterator_says_so_and_another_may_be_built() -> None:
    encoder: Encoder = AsyncVisionEncoder(Bare(build=exhaust), name=THREADS)
    with pytest.raises(EncoderFailed, match="StopIteration") as caught:
        await within_limit(encoder.aload("a model"))
    assert isinstance(caught.value.__cause__, StopIteration)
    async with AsyncVisionEncoder(Bare(), "a model") as another:
        assert await another.encode(["good"]) == seen("good")


@pytest.mark.parametrize("place", ["preprocess", "forward"])
async def test_a_backend_that_runs_out_of_an_iterator_fails_its_caller_and_serves_the_next(
    place: str,
) -> None:
    def preprocess(raw: str) -> Preprocessed[str]:
        if raw == "bad" and place == "preprocess":
            exhaust()
        return Preprocessed(raw)

    def forward(items: list[str]) -> None:
        if "bad" in items:
            exhaust()

    async with AsyncVisionEncoder(Probe(preprocess, forward=forward), "a model") as encoder:
        with pytest.raises(EncoderFailed, match="StopIteration") as caught:
            await within_limit(encoder.encode(["bad"]))
        assert isinstance(caught.value.__cause__, StopIteration)
        assert await within_limit(encoder.encode(["good"])) == seen("good")


class Base(BaseException):
    """Neither an Exception nor one of the interpreter's."""


@pytest.mark.parametrize(
    "fault",
    [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(), Base("own")],
    ids=lambda fault: type(fault).__name__,
)
async def test_what_would_end_a_thread_ends_no_caller_but_those_whose_images_raise_it(
    fault: BaseException,
) -> None:
    """Two requests in the batch that raises, three queued behind it, one afterwards."""

    def forward(items: list[str]) -> None:
        gate()
        if {"a", "b"} & set(items):
            raise fault

    gate = Gate()
    backend = Bare(forward=forward, max_batch_items=2)
    async with parked(backend, gate) as encoder:
        callers = [asyncio.create_task(encoder.encode([tag])) for tag in "abcde"]
        await asyncio.sleep(0)  # each takes its first step, into the queue
        gate.open()
        a, b, *behind = await outcomes_of(callers)
        assert await within_limit(encoder.encode(["f"])) == seen("f")
    assert backend.batches[1] == ["a", "b"]
    assert backend.calls.count("build") == 1  # its thread went on
    for error in (a, b):
        assert type(error) is EncoderFailed
        assert error.__cause__ is fault
    assert behind == [seen("c"), seen("d"), seen("e")]
    assert not any(caller.cancelled() for caller in callers)
    if sys.version_info >= (3, 11):
        assert {caller.cancelling() for caller in callers} == {0}


# -- one failure, many awaiters (FC-09) ----------------------------------------------------------------


class Thing:
    """An image that a weak reference can follow."""


async def test_fifty_callers_of_a_failing_batch_have_an_exception_each_and_keep_no_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("retinue"), "disabled", True)  # a record keeps what it reports

    def forward(items: list[Any]) -> None:
        gate()
        if any(isinstance(item, Thing) for item in items):
            raise RuntimeError("the device is lost")

    gate = Gate()
    backend = Bare(forward=forward)
    async with parked(backend, gate) as encoder:
        things = [Thing() for _ in range(50)]
        watched: list[weakref.ref[Any]] = [weakref.ref(thing) for thing in things]
        callers = [asyncio.create_task(encoder.encode([thing])) for thing in things]
        await asyncio.sleep(0)  # each takes its first step, into the queue
        del things
        gate.open()
        errors = await outcomes_of(callers)
        del callers
        assert len(backend.batches[1]) == 50
        backend.batches.clear()
        try:
            if sys.version_info >= (3, 11):
                errors[0].add_note("mine")
            raise KeyError("mine too") from errors[0]
        except KeyError:
            pass
        assert len(set(map(id, errors))) == 50
        for error in errors[1:]:
            assert isinstance(error, EncoderFailed)
            assert not hasattr(error, "__notes__")
            assert error.__context__ is None
            assert str(error.__cause__) == "the device is lost"
        assert len({len(traceback.extract_tb(error.__traceback__)) for error in errors[1:]}) == 1
        del error
        gc.collect()
        assert [ref() for ref in watched] == [None] * 50  # while the errors live
        watched = [weakref.ref(error) for error in errors]
        del errors
        gc.collect()
        assert [ref() for ref in watched] == [None] * 50


# -- who leaves before the claim (FC-12) ---------------------------------------------------------------


class Picture(NamedTuple):
    request: int
    place: int
    cost: int


@pytest.mark.parametrize("seed", range(20))
async def test_of_a_thousand_requests_no_image_that_left_before_its_claim_is_in_a_batch(seed: int) -> None:
    """Fifty requests a seed, of which some leave while the gate is closed and some race with what follows."""
    chance = random.Random(seed)
    gate = Gate()
    preprocess = refusing(lambda raw: Preprocessed(raw, cost=getattr(raw, "cost", 1)))
    backend = Probe(preprocess, forward=gate, max_batch_cost=10)
    requests = [
        [Picture(number, place, chance.randint(1, 9)) for place in range(chance.randint(1, 3))]
        for number in range(50)
    ]
    async with parked(backend, gate) as encoder:
        callers = [asyncio.create_task(encoder.encode(pictures)) for pictures in requests]
        await queued(encoder)
        early = chance.sample(range(50), 15)
        for number in early:
            callers[number].cancel()
        if seed % 2:  # else their tasks have not heard of it when the gate opens
            await asyncio.sleep(0)
        gate.open()
        for number in chance.sample(range(50), 15):
            await asyncio.sleep(chance.choice((0, 0, 0.0005)))  # a race, whose every outcome is right
            callers[number].cancel()
        outcomes = await outcomes_of(callers)
    claimed = [item for batch in backend.batches for item in batch if isinstance(item, Picture)]
    assert not {picture.request for picture in claimed} & set(early)
    assert len(claimed) == len(set(claimed))
    for batch in backend.batches[1:-1]:
        assert sum(picture.cost for picture in batch) <= 10
    for number, (outcome, pictures) in enumerate(zip(outcomes, requests, strict=True)):
        assert isinstance(outcome, asyncio.CancelledError) or outcome == seen(*pictures)
        assert isinstance(outcome, asyncio.CancelledError) or number not in early


# -- who leaves around the answer (FC-13) --------------------------------------------------------------


async def test_a_caller_who_leaves_around_the_answer_costs_its_batch_mate_nothing() -> None:
    """Two thousand times: 1 a batch holds both, 2 one of them leaves, before, as or after it is answered."""
    loop = asyncio.get_running_loop()
    leavers: list[asyncio.Task[Any]] = []

    def forward(items: list[tuple[str, int]]) -> None:
        number = items[0][1]
        if number % 3 == 0:  # before it is answered
            asyncio.run_coroutine_threadsafe(leave(leavers[number]), loop).result(LIMIT_S)
        elif number % 3 == 1:  # as it is
            loop.call_soon_threadsafe(leavers[number].cancel)

    async def leave(leaver: asyncio.Task[Any]) -> None:
        leaver.cancel()
        await asyncio.wait({leaver})

    class Late:
        def on_batch(self, record: BatchRecord) -> None:
            number = record.id - 1
            if number % 3 == 2:  # as it hears of its answer, or later
                loop.call_soon_threadsafe(leavers[number].cancel)

        def on_request(self, record: object) -> None:
            pass

    backend = Bare(forward=forward, max_batch_items=2)
    # Who comes first is held until the other has come, so that they share a batch.
    together = AsyncVisionEncoder(backend, "a model", max_wait_s=LIMIT_S, observer=Late())
    async with together as encoder:
        for number in range(2000):
            leaver = asyncio.create_task(encoder.encode([("leaves", number)]))
            leavers.append(leaver)
            assert await within_limit(encoder.encode([("stays", number)])) == seen(("stays", number))
            await asyncio.wait({leaver})
            assert leaver.cancelled() or leaver.result() == seen(("leaves", number))
            assert number % 3 == 2 or leaver.cancelled()
    assert backend.batches == [[("leaves", number), ("stays", number)] for number in range(2000)]


# -- a deadline while another's forward runs (FC-16) ---------------------------------------------------


async def by_wait_for(encoder: Encoder, limit_s: float) -> None:
    await asyncio.wait_for(encoder.encode(["late"]), limit_s)


async def by_timeout(encoder: Encoder, limit_s: float) -> None:
    async with asyncio.timeout(limit_s):
        await encoder.encode(["late"])


@pytest.mark.parametrize("backend_type", [Bare, Probe])
@pytest.mark.parametrize(
    "wait",
    [
        by_wait_for,
        pytest.param(
            by_timeout,
            marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio.timeout is Python 3.11's"),
        ),
    ],
)
async def test_a_deadline_passes_while_anothers_forward_runs_and_what_was_late_never_does(
    wait: Callable[[Encoder, float], Any], backend_type: type[Bare]
) -> None:
    gate = Gate()
    backend = backend_type(forward=gate)
    async with parked(backend, gate) as encoder:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        with pytest.raises(asyncio.TimeoutError):
            await wait(encoder, 0.2)
        assert 0.2 <= loop.time() - began_s < 2  # the gate is closed for ten times that
    assert backend.batches == [["first"], ["as ever"]]


# -- a process can exit (FC-60) ------------------------------------------------------------------------

BACKEND = """
from retinue import AsyncVisionEncoder, Preprocessed, VisionEncoderBackend

class Backend(VisionEncoderBackend):
    def __init__(self, forward=fn, build=lambda: None):
        self.forward, self.build_slowly = forward, build

    def build(self, model_id):
        on_start()
        self.build_slowly()

    def preprocess(self, raw):
        return Preprocessed(raw)

    def forward_batch(self, items, target_bucket=None):
        return self.forward(items)

    def close(self):
        on_stop()

def build_slowly():
    say("building")
    time.sleep(1)
    say("built")

def encoder_of(*args, **options):
    return AsyncVisionEncoder(Backend(*args), "a model", name="eyes", **options)
"""

#: A script, and its ending: exit status, what it says, the last line of its own traceback.
SCRIPTS = {
    "it forgets to close": (
        """
encoder = encoder_of()
encoder.load("a model")
say(asyncio.run(encoder.encode([1])))
""",
        (0, ["[1]", "stopped"], ""),
    ),
    "it raises within the loop": (
        """
async def main():
    encoder = encoder_of()
    await encoder.aload("a model")
    await encoder.encode([1])
    raise KeyError("main")

asyncio.run(main())
""",
        (1, ["stopped"], "KeyError: 'main'"),
    ),
    "sys.exit within the loop": (
        """
async def main():
    encoder = encoder_of()
    await encoder.aload("a model")
    await encoder.encode([1])
    sys.exit(3)

asyncio.run(main())
""",
        (3, ["stopped"], ""),
    ),
    "its encoder is only collected": (
        """
def forget():
    encoder = encoder_of()
    encoder.load("a model")
    say(asyncio.run(encoder.encode([1])))

forget()
gc.collect()
""",
        (0, ["[1]", "stopped"], ""),
    ),
}


@pytest.mark.parametrize(("script", "ending"), SCRIPTS.values(), ids=SCRIPTS.keys())
def test_a_script_exits_whatever_became_of_its_encoder(
    script: str, ending: tuple[int, list[str], str]
) -> None:
    code, said, error = ending
    exit_ = run(BACKEND + script)
    assert (exit_.code, exit_.said) == (code, said)
    assert is_the_scripts_own(exit_.errors, error) if error else exit_.errors == ""
    assert exit_.took_s < 5


#: What Ctrl-C is pressed at: the word that the script says then, the script, and all that it says.
INTERRUPTED = {
    "a forward": (
        "inside",
        """
async def main():
    encoder = encoder_of(slow)
    await encoder.aload("a model")
    await encoder.encode([1])

asyncio.run(main())
""",
        ["inside", "outside", "stopped"],
    ),
    "a forward within async with": (
        "inside",
        """
async def main():
    async with encoder_of(slow) as encoder:
        await encoder.encode([1])

asyncio.run(main())
""",
        ["inside", "outside", "stopped"],
    ),
    "load": ("building", "encoder_of(fn, build_slowly).load('a model')", ["building", "built", "stopped"]),
    "aload": (
        "building",
        "asyncio.run(encoder_of(fn, build_slowly).aload('a model'))",
        ["building", "built", "stopped"],
    ),
}


@pytest.mark.parametrize(("word", "script", "said"), INTERRUPTED.values(), ids=INTERRUPTED.keys())
def test_an_interrupt_ends_a_script_once_the_actor_is_free_to_close(
    word: str, script: str, said: list[str]
) -> None:
    exit_ = run(BACKEND + script, interrupt_at=word)
    assert (exit_.code, exit_.said) == (-signal.SIGINT, said)
    assert is_the_scripts_own(exit_.errors, "KeyboardInterrupt")
    assert exit_.took_s < 5


def test_a_forward_that_is_stuck_delays_the_exit_by_the_grace() -> None:
    exit_ = run(
        BACKEND
        + """
async def main():
    encoder = encoder_of(stuck, join_timeout_s=0.5)
    await encoder.aload("a model")
    task = asyncio.ensure_future(encoder.encode([1]))
    await asyncio.to_thread(inside.acquire)
    task.cancel()

asyncio.run(main())
"""
    )
    assert (exit_.code, exit_.said) == (0, ["inside"])
    assert exit_.errors == "eyes: a call still runs 0.5 s after the exit began; leaving it\n"
    assert 0.5 <= exit_.took_s < 5


# -- a shutdown amid requests (FC-74) ------------------------------------------------------------------


@pytest.mark.parametrize("answers_before", [0, 1, 8, 40, 200])
def test_a_shutdown_amid_encodes_of_eight_threads_answers_all_and_closes_once_at_last(
    answers_before: int,
) -> None:
    backend = Probe(preprocess_concurrency=2, max_batch_items=3)
    encoder: Encoder = AsyncVisionEncoder(backend, name=THREADS)
    encoder.load("a model")
    answered = threading.Semaphore(0)
    at_once = threading.Barrier(9)

    async def ask(number: int) -> str:
        while True:
            try:
                artifacts = await within_limit(encoder.encode([number, -number]))
            except EncoderUnavailable as error:
                return str(error)
            assert artifacts == seen(number, -number)
            answered.release()

    def caller(number: int) -> str:
        at_once.wait(LIMIT_S)
        refusal = asyncio.run(ask(number))
        encoder.shutdown()  # once more, as others do at the same time
        return refusal

    with ThreadPoolExecutor(8) as threads:
        callers = [threads.submit(caller, number) for number in range(8)]
        at_once.wait(LIMIT_S)
        for _ in range(answers_before):
            assert answered.acquire(timeout=LIMIT_S)
        encoder.shutdown()
        refusals = {each.result(LIMIT_S) for each in callers}
    assert all("shut down" in refusal or "after shutdown" in refusal for refusal in refusals)
    asyncio.run(ended(THREADS))
    assert backend.calls.count("close") == 1
    assert backend.calls[-1] == "close"
