"""The preprocess phase: all of a request or nothing, and whose fault it is when it fails."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import threading
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

import numpy as np
import pytest

from retinue import (
    AsyncVisionEncoder,
    BatchRecord,
    DeadlineExceeded,
    EncoderFailed,
    EncoderUnavailable,
    InvalidInput,
    Overloaded,
    Preprocessed,
    RequestRecord,
    RetinueError,
    VisionEncoderBackend,
)

from .support import LIMIT_S, Bare, Gate, Probe, live_threads, queued, refusing, seen

# -- all or nothing ------------------------------------------------------------------------------------


async def test_all_images_of_a_request_are_preprocessed_before_any_is_batched() -> None:
    gate = Gate()

    def preprocess(raw: str) -> Preprocessed[str]:
        if raw == "slow":
            gate()
        return Preprocessed(raw)

    backend = Probe(preprocess, preprocess_concurrency=2)
    async with AsyncVisionEncoder(backend, "a model") as encoder:
        request = asyncio.create_task(encoder.encode(["quick", "slow", "quick, too"]))
        await gate.reached()
        assert await encoder.encode(["a neighbour"]) == seen("a neighbour")  # after "quick, too"
        assert set(backend.begun) == {"quick", "slow", "quick, too", "a neighbour"}
        assert backend.batches == [["a neighbour"]]
        gate.open()
        assert await request == seen("quick", "slow", "quick, too")
    assert backend.batches == [["a neighbour"], ["quick", "slow", "quick, too"]]


async def test_the_first_failure_answers_at_once_and_what_has_not_begun_never_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = Gate()
    parked = threading.Event()

    def preprocess(raw: str) -> Preprocessed[str]:
        if raw == "parked":
            parked.set()
            gate()
        if raw == "bad":
            assert parked.wait(LIMIT_S)
            raise ValueError
        return Preprocessed(raw)

    backend = Probe(preprocess, preprocess_concurrency=2)
    async with AsyncVisionEncoder(backend, "a model") as encoder:
        request = encoder.encode(["parked", "bad", "never", "never, either"])
        with pytest.raises(InvalidInput, match="image 2 of 4"):  # while "parked" is still at the gate
            await asyncio.wait_for(request, LIMIT_S)
        assert await encoder.encode(["next"]) == seen("next")
        gate.open()
    assert sorted(backend.begun) == ["bad", "next", "parked"]
    assert backend.batches == [["next"]]
    assert caplog.messages == []


async def test_two_failures_of_one_request_are_one_answer() -> None:
    both = threading.Barrier(2)

    def preprocess(raw: str) -> NoReturn:
        both.wait(LIMIT_S)
        raise ValueError(raw)

    async with AsyncVisionEncoder(Probe(preprocess, preprocess_concurrency=2), "a model") as encoder:
        for _ in range(20):
            with pytest.raises(InvalidInput, match=r"image [12] of 2"):
                await asyncio.wait_for(encoder.encode(["bad", "bad, too"]), LIMIT_S)


async def test_a_caller_who_leaves_stops_what_has_not_begun(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()

    def preprocess(raw: str) -> Preprocessed[str]:
        if raw == "parked":
            gate()
        return Preprocessed(raw)

    backend = Probe(preprocess)
    async with AsyncVisionEncoder(backend, "a model") as encoder:
        request = asyncio.create_task(encoder.encode(["parked", "never"]))
        await gate.reached()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):  # at once: its image is still at the gate
            await request
        gate.open()
        assert await encoder.encode(["next"]) == seen("next")
    assert backend.begun == ["parked", "next"]
    assert backend.batches == [["next"]]
    assert caplog.messages == []


async def test_a_caller_who_leaves_after_preprocess_keeps_its_images_from_the_next_batch() -> None:
    gate = Gate()
    backend = Probe(refusing(Preprocessed), forward=gate, max_batch_items=1)
    async with AsyncVisionEncoder(backend, "a model") as encoder:
        running = asyncio.create_task(encoder.encode(["running"]))
        await gate.reached()
        leaving = asyncio.create_task(encoder.encode(["left"]))
        staying = asyncio.create_task(encoder.encode(["stays"]))
        await queued(encoder)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        gate.open()
        assert await running == seen("running")
        assert await staying == seen("stays")
    assert backend.batches == [["running"], ["stays"]]


async def test_an_abandoned_encode_stops_what_has_not_begun() -> None:
    gate = Gate()
    backend = Probe(gate.before(Preprocessed))
    async with AsyncVisionEncoder(backend, "a model") as encoder:
        abandoned = encoder.encode(["parked", "never"])
        abandoned.send(None)
        await gate.reached()
        abandoned.close()  # as the garbage collector does
        gate.open()
        assert await encoder.encode(["next"]) == seen("next")
    assert backend.begun == ["parked", "next"]


class CollectingLoop(asyncio.SelectorEventLoop):
    """Ends abandoned coroutines while it makes a future, where the garbage collector might."""

    abandoned: list[Coroutine[Any, Any, Any]]

    def create_future(self) -> asyncio.Future[Any]:
        while self.abandoned:
            self.abandoned.pop().close()
        return super().create_future()


def test_the_garbage_collector_may_end_one_encode_within_another() -> None:
    gate = Gate()
    loop = CollectingLoop()
    loop.abandoned = []

    async def main() -> None:
        async with AsyncVisionEncoder(Probe(gate.before(Preprocessed)), "a model") as encoder:
            abandoned = encoder.encode(["parked", "never"])
            abandoned.send(None)
            await gate.reached()
            gate.open()
            loop.abandoned.append(abandoned)
            del abandoned
            assert await encoder.encode(["next"]) == seen("next")
            assert loop.abandoned == []

    try:
        loop.run_until_complete(main())
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


def test_an_event_loop_that_closed_meanwhile_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    encoder = AsyncVisionEncoder(Probe(gate.before(Preprocessed)))
    encoder.load("a model")
    orphan = encoder.encode(["parked"])

    async def begin() -> None:
        orphan.send(None)
        await gate.reached()

    asyncio.run(begin())
    gate.open()
    assert asyncio.run(encoder.encode(["next"])) == seen("next")
    encoder.shutdown()
    orphan.close()
    assert caplog.messages == []


async def test_a_deadline_of_the_callers_own_ends_its_wait_for_preprocess() -> None:
    gate = Gate()
    backend = Probe(gate.before(Preprocessed))
    async with AsyncVisionEncoder(backend, "a model") as encoder:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(encoder.encode(["parked", "never"]), 0.01)
        gate.open()
        assert await encoder.encode(["next"]) == seen("next")
    assert "never" not in backend.begun


async def test_a_caller_may_change_its_list_while_it_waits() -> None:
    gate = Gate()
    raws = ["one", "two"]
    backend = Probe(gate.before(Preprocessed))
    async with AsyncVisionEncoder(backend, "a model") as encoder:
        request = asyncio.create_task(encoder.encode(raws))
        await gate.reached()
        raws.clear()
        gate.open()
        assert await request == seen("one", "two")


async def test_one_text_is_not_taken_for_a_sequence_of_images() -> None:
    async with AsyncVisionEncoder(Probe(), "a model") as encoder:
        for raw in ("data:image/png;base64,", b"\x89PNG"):
            with pytest.raises(TypeError, match=f"a sequence of raws, got one {type(raw).__name__}"):
                await encoder.encode(raw)


# -- context -------------------------------------------------------------------------------------------

trace: contextvars.ContextVar[str] = contextvars.ContextVar("trace", default="none")


async def test_preprocess_sees_its_callers_context_and_cannot_change_it() -> None:
    def preprocess(raw: str) -> Preprocessed[str]:
        found = trace.get()
        trace.set(f"changed by {raw}")
        return Preprocessed(f"{raw} for {found}")

    async def call(name: str) -> Any:
        trace.set(name)
        artifacts = await encoder.encode(["1", "2"])
        assert trace.get() == name
        return artifacts

    async with AsyncVisionEncoder(Probe(preprocess), "a model") as encoder:
        results = await asyncio.gather(*(asyncio.create_task(call(name)) for name in "ab"))
    assert results == [seen("1 for a", "2 for a"), seen("1 for b", "2 for b")]


# -- whose fault ---------------------------------------------------------------------------------------


def raising(error: BaseException) -> Callable[[Any], Any]:
    """A preprocess that raises ``error`` for the raw "bad"."""

    def preprocess(raw: Any) -> Preprocessed[Any]:
        if raw == "bad":
            raise error
        return Preprocessed(raw)

    return preprocess


async def error_of(preprocess: Callable[[Any], Any], **options: Any) -> RetinueError:
    """The error of a request whose 2nd image of 3 is bad, on an encoder that serves the next one well."""
    backend = Probe(preprocess, **options)
    async with AsyncVisionEncoder(backend, "a model") as encoder:
        with pytest.raises(RetinueError) as caught:
            await asyncio.wait_for(encoder.encode(["good", "bad", "good, too"]), LIMIT_S)
        assert await asyncio.wait_for(encoder.encode(["next"]), LIMIT_S) == seen("next")
    assert backend.batches == [["next"]]
    return caught.value


async def test_invalid_input_of_an_author_keeps_its_text_and_gains_the_position() -> None:
    error = InvalidInput("the picture is 3x3, the smallest that I take is 14x14")
    caught = await error_of(raising(error))
    assert type(caught) is InvalidInput
    assert str(caught) == "image 2 of 3: the picture is 3x3, the smallest that I take is 14x14"
    assert caught.__cause__ is error


class Mute(InvalidInput):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize("error", [InvalidInput(), Mute()])
async def test_invalid_input_without_words_gets_ours(error: InvalidInput) -> None:
    caught = await error_of(raising(error))
    assert type(caught) is InvalidInput
    assert str(caught) == "image 2 of 3: refused by preprocess"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("cannot read /secret/path"),
        TypeError("cannot read /secret/path"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "/secret/path"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_value_or_type_error_is_the_callers_fault_without_its_text(error: Exception) -> None:
    caught = await error_of(raising(error))
    assert type(caught) is InvalidInput
    assert str(caught) == "image 2 of 3 was refused by preprocess"
    assert caught.__cause__ is error
    if hasattr(caught, "add_note"):  # Python 3.11
        assert caught.__notes__ == [f"{type(error).__name__}: {error}"]


class Custom(BaseException):
    pass


@pytest.mark.parametrize(
    "error",
    [
        KeyError("pixels"),
        OSError(5, "a broken disk"),
        StopIteration("empty"),
        StopAsyncIteration(),
        GeneratorExit(),
        SystemExit(3),
        KeyboardInterrupt(),
        asyncio.CancelledError(),
        concurrent.futures.CancelledError(),
        MemoryError(),
        Custom("own"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_any_other_exception_is_the_backends_fault(error: BaseException) -> None:
    caught = await error_of(raising(error))
    assert type(caught) is EncoderFailed
    assert str(caught).startswith(f"image 2 of 3: preprocess raised {type(error).__name__}")
    assert caught.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [
        Overloaded("the tokenizer is busy", retry_after=2.0),
        DeadlineExceeded("the download took too long"),
        EncoderFailed("no processor"),
        EncoderUnavailable("the disk is being replaced"),
        RetinueError("of a new kind"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_other_errors_of_the_tree_pass_as_the_callers_own(error: RetinueError) -> None:
    caught = await error_of(raising(error))
    assert type(caught) is type(error)
    assert caught is not error
    assert caught.args == error.args
    assert caught.__cause__ is error


@pytest.mark.parametrize("error", [InvalidInput("too dark"), ValueError("too dark")])
async def test_the_position_of_a_refused_image_is_told(error: Exception) -> None:
    def preprocess(raw: str) -> Preprocessed[str]:
        if raw == "bad":
            raise error
        return Preprocessed(raw)

    async with AsyncVisionEncoder(Probe(preprocess), "a model") as encoder:
        with pytest.raises(InvalidInput) as caught:
            await encoder.encode(["good", "good", "bad"])
    assert caught.value.position == 2


async def test_an_observer_that_asks_hears_how_long_each_preprocess_took(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Ear:
        def __init__(self) -> None:
            self.durations_s: list[float] = []

        def on_batch(self, record: BatchRecord) -> None:
            pass

        def on_request(self, record: RequestRecord) -> None:
            pass

        def on_preprocess(self, duration_s: float) -> None:
            self.durations_s.append(duration_s)
            raise RuntimeError("its own fault, which harms nobody")

    ear = Ear()
    async with AsyncVisionEncoder(Probe(Preprocessed), "a model", observer=ear) as encoder:
        assert await encoder.encode([1, 2, 3]) == seen(1, 2, 3)
    assert len(ear.durations_s) == 3
    assert all(duration_s >= 0 for duration_s in ear.durations_s)
    assert "an observer raised" in caplog.text


# -- what preprocess returns ---------------------------------------------------------------------------


class Unspeakable:
    """Not to be hashed, counted or shown."""

    def __hash__(self) -> int:
        raise RuntimeError("no hash")

    def __index__(self) -> int:
        raise RuntimeError("no index")

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def returning(value: object) -> Callable[[Any], Any]:
    """A preprocess that returns ``value`` for the raw "bad"."""
    return lambda raw: value if raw == "bad" else Preprocessed(raw)


@pytest.mark.parametrize("value", [None, "bad", ("bad", 1), {"item": 1, "cost": 1}], ids=repr)
async def test_a_return_value_of_another_type_is_refused(value: object) -> None:
    caught = await error_of(returning(value))
    assert type(caught) is EncoderFailed
    assert str(caught) == f"image 2 of 3: preprocess must return Preprocessed, got {type(value).__name__}"


@pytest.mark.parametrize("key", [["a", "list"], {"a": "dict"}, ({}, 1)], ids=repr)
async def test_a_key_that_cannot_be_hashed_is_refused(key: Any) -> None:
    caught = await error_of(returning(Preprocessed("item", key=key)))
    assert type(caught) is EncoderFailed
    assert "image 2 of 3: unhashable type" in str(caught)


@pytest.mark.parametrize("cap", [None, 8])
@pytest.mark.parametrize("field", ["key", "cost"])
async def test_a_cost_or_key_that_raises_hangs_nobody(field: str, cap: int | None) -> None:
    bad: dict[str, Any] = {field: Unspeakable()}
    caught = await error_of(returning(Preprocessed("item", **bad)), max_batch_cost=cap)
    assert type(caught) is EncoderFailed
    assert str(caught).startswith("image 2 of 3: its cost or key raised RuntimeError: no ")


async def test_a_cost_that_is_too_long_to_be_shown_hangs_nobody() -> None:
    caught = await error_of(returning(Preprocessed("item", cost=10**5000)), max_batch_cost=8)
    assert str(caught).startswith("image 2 of 3")


async def test_a_cost_that_no_batch_can_hold_is_the_callers_fault_and_names_the_setting() -> None:
    caught = await error_of(returning(Preprocessed("item", cost=5000)), max_batch_cost=4096)
    assert type(caught) is InvalidInput
    assert str(caught) == (
        "image 2 of 3 costs 5000, which exceeds max_batch_cost=4096; it would need max_batch_cost=5000"
    )


async def test_the_last_of_the_buckets_caps_the_cost_too() -> None:
    caught = await error_of(returning(Preprocessed("item", cost=9)), buckets=(2, 8))
    assert str(caught).startswith("image 2 of 3 costs 9, which exceeds max_batch_cost=8")


def bad_size(_: Any) -> NoReturn:
    raise ZeroDivisionError


@pytest.mark.parametrize("cap", [None, 8])
@pytest.mark.parametrize(
    ("cost", "fault"),
    [
        (bad_size, EncoderFailed),
        (None, EncoderFailed),
        ("3", EncoderFailed),
        (0, EncoderFailed),
        (-1, EncoderFailed),
        (2.5, EncoderFailed),
        (2.0, EncoderFailed),
        (float("nan"), EncoderFailed),
        (float("inf"), EncoderFailed),
        (True, EncoderFailed),
        (np.float64(2), EncoderFailed),
        (np.array([1, 2]), EncoderFailed),
        (10**30, InvalidInput),
        (np.int64(9), InvalidInput),
    ],
    ids=lambda value: getattr(value, "__name__", repr(value)),
)
async def test_one_bad_cost_fails_its_request_alone(
    cost: Any, fault: type[RetinueError], cap: int | None
) -> None:
    """FC-01: three concurrent requests behind a closed gate, the second of a bad cost; then a fourth."""
    gate = Gate()

    def preprocess(raw: str) -> Preprocessed[str]:
        if raw == "bad":
            return Preprocessed(raw, cost=cost(raw) if cost is bad_size else cost)
        return Preprocessed(raw, cost=2)

    backend = Probe(preprocess, forward=gate, max_batch_cost=cap)
    async with AsyncVisionEncoder(backend, "a model") as encoder:
        first = asyncio.create_task(encoder.encode(["first"]))
        await gate.reached()
        second = asyncio.create_task(encoder.encode(["good", "bad"]))
        third = asyncio.create_task(encoder.encode(["third"]))
        if cap is not None or fault is EncoderFailed:
            with pytest.raises(fault, match=r"image 2 of 2.*cost|image 2 of 2: preprocess raised ZeroDiv"):
                await asyncio.wait_for(second, LIMIT_S)  # while the gate is closed
            gate.open()
        else:  # without a cap, any int is a cost
            gate.open()
            assert await second == seen("good", "bad")
        assert await asyncio.wait_for(first, LIMIT_S) == seen("first")
        assert await asyncio.wait_for(third, LIMIT_S) == seen("third")
        assert await asyncio.wait_for(encoder.encode(["fourth"]), LIMIT_S) == seen("fourth")


@pytest.mark.parametrize("integer", [np.int64, np.uint8])
async def test_a_numpy_int_is_a_cost(integer: Callable[[int], Any]) -> None:
    backend = Probe(lambda raw: Preprocessed(raw, cost=integer(3)), max_batch_cost=6)
    async with AsyncVisionEncoder(backend, "a model") as encoder:
        assert await encoder.encode(["a", "b", "c"]) == seen("a", "b", "c")
    assert backend.batches == [["a", "b"], ["c"]]


async def test_cost_and_key_decide_what_shares_a_batch() -> None:
    backend = Probe(lambda raw: Preprocessed(raw, *raw), max_batch_cost=10)
    async with AsyncVisionEncoder(backend, "a model") as encoder:
        raws = [(6, "wide"), (5, "wide"), (4, "tall"), (4, "wide"), (6, "tall")]
        assert await encoder.encode(raws) == seen(*raws)
    assert backend.batches == [[(6, "wide"), (4, "wide")], [(5, "wide")], [(4, "tall"), (6, "tall")]]


# -- whether there is such a phase, and how many threads it has ----------------------------------------


async def test_a_backend_without_preprocess_has_no_such_phase_and_no_threads_for_it(name: str) -> None:
    gate = Gate()
    backend = Bare(forward=gate, max_batch_cost=2, preprocess_concurrency=4)
    async with AsyncVisionEncoder(backend, "a model", name=name) as encoder:
        request = asyncio.create_task(encoder.encode(["a", "b", "c"]))
        await gate.reached()
        assert live_threads(name) == [name]
        gate.open()
        assert await request == seen("a", "b", "c")
    assert backend.batches == [["a", "b"], ["c"]]  # its raws are its items, of cost 1


class Inherits(Bare):
    pass


class InheritsAPreprocess(Probe):
    pass


@pytest.mark.parametrize(("backend_type", "phase"), [(Inherits, False), (InheritsAPreprocess, True)])
async def test_an_inherited_preprocess_counts_as_the_authors(
    name: str, backend_type: type[Bare], phase: bool
) -> None:
    async with AsyncVisionEncoder(backend_type(), "a model", name=name):
        assert (len(live_threads(name)) > 1) == phase


async def test_the_class_alone_decides_whether_there_is_a_preprocess_phase(name: str) -> None:
    backend = Bare(preprocess_concurrency=2)
    backend.preprocess = lambda raw: Preprocessed(f"prepared {raw}")  # type: ignore[method-assign]  # the case
    async with AsyncVisionEncoder(backend, "a model", name=name) as encoder:
        assert len(live_threads(name)) == 1
        assert await encoder.encode(["image"]) == seen("image")


@pytest.mark.parametrize(
    ("own", "override", "threads"), [(2, None, 2), (2, 3, 3), (None, 3, 3), (np.int64(2), None, 2)]
)
async def test_preprocess_concurrency_is_the_number_of_images_preprocessed_at_once(
    name: str, own: Any, override: int | None, threads: int
) -> None:
    together = threading.Barrier(threads)
    begun = threading.Semaphore(0)
    gate = Gate()

    def preprocess(raw: int) -> Preprocessed[int]:
        together.wait(LIMIT_S)
        begun.release()
        gate()
        return Preprocessed(raw)

    backend = Probe(preprocess, preprocess_concurrency=own)
    encoder = AsyncVisionEncoder(backend, "a model", name=name, preprocess_concurrency=override)
    async with encoder:
        assert live_threads(name)[1:] == [f"{name}-preprocess-{n}" for n in range(1, threads + 1)]
        request = asyncio.create_task(encoder.encode(list(range(2 * threads))))
        await asyncio.to_thread(lambda: [begun.acquire(timeout=LIMIT_S) for _ in range(threads)])
        assert sorted(backend.begun) == list(range(threads))
        gate.open()
        assert await request == seen(*range(2 * threads))


async def test_by_default_there_are_as_many_threads_as_cores_for_this_process(
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 2, 5}, raising=False)
    async with AsyncVisionEncoder(Probe(preprocess_concurrency=None), "a model", name=name):
        assert len(live_threads(name)) == 1 + 3


@pytest.mark.parametrize("bad", [-1, True, 1.5, "2"], ids=repr)
@pytest.mark.parametrize("backend_type", [Bare, Probe])
def test_a_preprocess_concurrency_that_is_no_count_is_refused_at_birth(
    backend_type: type[Bare], bad: Any
) -> None:
    for own, override in ((bad, None), (None, bad)):
        with pytest.raises(
            ValueError, match=f"preprocess_concurrency must be None or an int >= 0, got {bad!r}"
        ):
            AsyncVisionEncoder(backend_type(preprocess_concurrency=own), preprocess_concurrency=override)


def test_no_threads_for_a_preprocess_that_exists_is_a_contradiction() -> None:
    for own, override in ((0, None), (2, 0)):
        with pytest.raises(ValueError, match="preprocess_concurrency is 0, but Probe overrides preprocess"):
            AsyncVisionEncoder(Probe(preprocess_concurrency=own), preprocess_concurrency=override)


def test_no_threads_for_no_preprocess_is_none() -> None:
    AsyncVisionEncoder(Bare(preprocess_concurrency=0))


def test_a_backend_may_do_without_preprocess_altogether() -> None:
    class Least(VisionEncoderBackend[int, int, int]):
        def build(self, model_id: str) -> None:
            pass

        def forward_batch(self, items: list[int], target_bucket: int | None = None) -> list[int]:
            return [2 * item for item in items]

    async def main() -> list[int]:
        async with AsyncVisionEncoder(Least(), "a model") as encoder:
            return await encoder.encode([1, 2, 3])

    assert asyncio.run(main()) == [2, 4, 6]
