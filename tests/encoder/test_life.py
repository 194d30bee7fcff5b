"""An encoder's life: built on one thread, loaded once, closed once, at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

import pytest

from retinue import AsyncVisionEncoder, EncoderFailed, EncoderUnavailable, Preprocessed, ThreadedMicroBatcher

from .support import (
    LIMIT_S,
    Bare,
    Gate,
    Probe,
    ended,
    in_three_loops,
    live_threads,
    queued,
    refusing,
    seen,
)

Encoder: TypeAlias = AsyncVisionEncoder[Any, Any, Any]


async def by_load(encoder: Encoder) -> None:
    await asyncio.to_thread(encoder.load, "a model")


async def by_aload(encoder: Encoder) -> None:
    await encoder.aload("a model")


async def by_shutdown(encoder: Encoder) -> None:
    await asyncio.to_thread(encoder.shutdown)


async def by_aclose(encoder: Encoder) -> None:
    await encoder.aclose()


Way: TypeAlias = Callable[[Encoder], Coroutine[Any, Any, None]]
every_way_to_load = pytest.mark.parametrize("load", [by_load, by_aload])
every_way_to_close = pytest.mark.parametrize("close", [by_shutdown, by_aclose])


# -- one thread ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend_type", [Bare, Probe])
def test_forty_first_requests_from_three_loops_meet_one_build_on_a_thread_of_its_own(
    backend_type: type[Bare],
) -> None:
    local = threading.local()
    found: list[object] = []

    def build(model_id: str) -> None:
        local.graph = model_id

    def look(*_: object) -> None:
        found.append(getattr(local, "graph", None))

    backend = backend_type(build=build, forward=look, close=look)
    encoder = AsyncVisionEncoder(backend)
    encoder.load("a model")

    async def requests(loop_number: int) -> list[Any]:
        mine = range(loop_number, 40, 3)
        return list(await asyncio.gather(*(encoder.encode([number]) for number in mine)))

    results = in_three_loops(requests)
    encoder.shutdown()

    for loop_number, result in enumerate(results):
        assert result == [seen(number) for number in range(loop_number, 40, 3)]
    assert len(set(backend.threads)) == 1
    assert threading.get_ident() not in backend.threads
    assert backend.calls[0] == "build"
    assert backend.calls[-1] == "close"
    assert set(backend.calls[1:-1]) == {"forward_batch"}
    assert set(found) == {"a model"}


async def test_a_request_during_a_slow_build_is_refused_and_nothing_of_it_runs() -> None:
    gate = Gate()
    backend = Probe(build=gate)
    encoder = AsyncVisionEncoder(backend)
    loading = asyncio.create_task(encoder.aload("a model"))
    await gate.reached()
    for raws in (["early"], []):
        with pytest.raises(EncoderUnavailable, match=r"encode\(\) called before load\(\) was done"):
            await encoder.encode(raws)
    gate.open()
    await loading
    assert await encoder.encode(["late"]) == seen("late")
    await encoder.aclose()
    assert backend.begun == ["late"]


# -- load ----------------------------------------------------------------------------------------------


async def test_async_with_builds_while_the_event_loop_goes_on() -> None:
    gate = Gate()
    backend = Bare(build=gate, forward=lambda _: None)
    beats = 0

    async def heart() -> None:
        nonlocal beats
        while True:
            beats += 1
            await asyncio.sleep(0)

    async def use() -> Any:
        async with AsyncVisionEncoder(backend, "a model") as encoder:
            return await encoder.encode(["image"])

    beating = asyncio.create_task(heart())
    using = asyncio.create_task(use())
    await gate.reached()
    before = beats
    for _ in range(10):
        await asyncio.sleep(0)
    assert beats >= before + 9
    gate.open()
    assert await using == seen("image")
    beating.cancel()
    assert backend.calls == ["build", "forward_batch", "close"]


async def test_build_gets_the_model_id() -> None:
    got: list[str] = []
    async with AsyncVisionEncoder(Bare(build=got.append), "path/of/the/weights"):
        assert got == ["path/of/the/weights"]


async def test_async_with_needs_a_model_id() -> None:
    with pytest.raises(RuntimeError, match="needs its model_id"):
        async with AsyncVisionEncoder(Bare()):
            pass


async def test_a_caller_who_leaves_during_the_build_shuts_the_encoder_down(name: str) -> None:
    gate = Gate()
    backend = Probe(build=gate)
    encoder = AsyncVisionEncoder(backend, "a model", name=name)
    entering = asyncio.create_task(encoder.__aenter__())
    await gate.reached()
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):  # at once: the build is still at the gate
        await entering
    with pytest.raises(EncoderUnavailable):
        await encoder.encode(["image"])
    gate.open()
    await ended(name)
    assert backend.calls == ["build", "close"]


@every_way_to_load
async def test_a_second_load_is_refused_and_changes_nothing(name: str, load: Way) -> None:
    backend = Probe()
    async with AsyncVisionEncoder(backend, "a model", name=name) as encoder:
        threads = live_threads(name)
        with pytest.raises(RuntimeError, match=r"load\(\) called twice"):
            await load(encoder)
        assert live_threads(name) == threads
        assert await encoder.encode(["image"]) == seen("image")
    with pytest.raises(RuntimeError, match=r"load\(\) called twice"):
        await load(encoder)
    assert backend.calls == ["build", "forward_batch", "close"]


@every_way_to_load
async def test_a_second_load_is_refused_while_the_first_still_builds(load: Way) -> None:
    gate = Gate()
    backend = Bare(build=gate)
    encoder = AsyncVisionEncoder(backend)
    first = asyncio.create_task(encoder.aload("a model"))
    await gate.reached()
    with pytest.raises(RuntimeError, match=r"load\(\) called twice"):
        await load(encoder)
    gate.open()
    await first
    assert await encoder.encode(["image"]) == seen("image")
    await encoder.aclose()
    assert backend.calls == ["build", "forward_batch", "close"]


def raising(error: BaseException) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


@every_way_to_load
@pytest.mark.parametrize("backend_type", [Bare, Probe])
async def test_a_build_error_comes_out_of_load_and_leaves_nothing_running(
    name: str, load: Way, backend_type: type[Bare]
) -> None:
    error = FileNotFoundError("no weights")
    backend = backend_type(build=raising(error), preprocess_concurrency=32)
    encoder = AsyncVisionEncoder(backend, name=name)
    with pytest.raises(FileNotFoundError) as caught:
        await load(encoder)
    assert caught.value is error
    assert live_threads(name) == []
    assert backend.calls == ["build"]
    for raws in (["image"], []):
        with pytest.raises(EncoderUnavailable, match=r"encode\(\) called after load\(\) failed"):
            await encoder.encode(raws)
    await encoder.aclose()
    encoder.shutdown()
    assert backend.calls == ["build"]


@every_way_to_load
@pytest.mark.parametrize(
    "error", [StopIteration(), SystemExit(3), asyncio.CancelledError(), KeyboardInterrupt()], ids=repr
)
async def test_a_build_error_that_no_future_can_carry_comes_out_as_a_cause(
    name: str, load: Way, error: BaseException
) -> None:
    encoder = AsyncVisionEncoder(Bare(build=raising(error)), name=name)
    with pytest.raises(EncoderFailed) as caught:
        await asyncio.wait_for(load(encoder), LIMIT_S)
    assert caught.value.__cause__ is error
    assert live_threads(name) == []


@every_way_to_load
async def test_limits_that_contradict_each_other_are_refused_before_anything_starts(
    name: str, load: Way
) -> None:
    backend = Probe(max_batch_cost=8, buckets=(2, 4))
    encoder = AsyncVisionEncoder(backend, name=name)
    with pytest.raises(ValueError, match="the last of buckets must equal max_batch_cost, got 4 and 8"):
        await load(encoder)
    assert live_threads(name) == []
    assert backend.calls == []


# -- encode out of season ------------------------------------------------------------------------------


@every_way_to_close
@pytest.mark.parametrize("raws", [["image"], []], ids=["one", "none"])
async def test_encode_before_load_and_after_shutdown_says_so(close: Way, raws: list[Any]) -> None:
    backend = Probe()
    encoder = AsyncVisionEncoder(backend)
    with pytest.raises(EncoderUnavailable, match=r"encode\(\) called before load\(\)$"):
        await encoder.encode(raws)
    await encoder.aload("a model")
    assert await encoder.encode(raws) == seen(*raws)
    await close(encoder)
    with pytest.raises(EncoderUnavailable, match=r"encode\(\) called after shutdown\(\)$"):
        await encoder.encode(raws)
    assert backend.begun == raws


# -- shutdown ------------------------------------------------------------------------------------------


@every_way_to_close
async def test_shutdown_leaves_no_thread_and_closes_once_however_often_it_is_called(
    name: str, close: Way
) -> None:
    backend = Probe(preprocess_concurrency=3)
    encoder = AsyncVisionEncoder(backend, name=name)
    await encoder.aload("a model")
    await encoder.encode(["image"])
    assert len(live_threads(name)) == 4
    await close(encoder)
    assert live_threads(name) == []
    await close(encoder)
    encoder.shutdown(wait=False)
    assert backend.calls == ["build", "forward_batch", "close"]


@every_way_to_close
async def test_shutdown_before_load_does_nothing(close: Way) -> None:
    encoder = AsyncVisionEncoder(Probe(), "a model")
    await close(encoder)
    async with encoder:
        assert await encoder.encode(["image"]) == seen("image")


@every_way_to_close
async def test_shutdown_waits_for_one_that_did_not_wait(
    name: str, close: Way, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    encoder = AsyncVisionEncoder(Bare(close=gate), "a model", name=name, join_timeout_s=0.05)
    await encoder.aload("a model")
    encoder.shutdown(wait=False)
    await gate.reached()
    assert caplog.messages == []
    await close(encoder)  # it says that it has waited in vain
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    gate.open()
    await ended(name)
    await close(encoder)
    assert live_threads(name) == []


@every_way_to_close
async def test_shutdown_waits_for_forward_and_preprocess_together_no_longer_than_it_says(
    name: str, close: Way, caplog: pytest.LogCaptureFixture
) -> None:
    in_preprocess, in_forward = Gate(), Gate()

    def preprocess(raw: str) -> Preprocessed[str]:
        if raw == "stuck in preprocess":
            in_preprocess()
        return Preprocessed(raw)

    backend = Probe(preprocess, forward=in_forward)
    encoder = AsyncVisionEncoder(backend, name=name, join_timeout_s=1.0)
    await encoder.aload("a model")
    forwarded = asyncio.create_task(encoder.encode(["stuck in forward"]))
    await in_forward.reached()
    preprocessed = asyncio.create_task(encoder.encode(["stuck in preprocess"]))
    await in_preprocess.reached()
    began_s = time.monotonic()
    await close(encoder)
    assert 0.9 < time.monotonic() - began_s < 1.8
    assert len(caplog.records) == 2  # one for each of the two
    in_preprocess.open()
    in_forward.open()
    assert await forwarded == seen("stuck in forward")  # a running forward finishes and is delivered
    with pytest.raises(EncoderUnavailable):
        await preprocessed
    await close(encoder)
    assert live_threads(name) == []


@pytest.mark.parametrize("wait", [True, False])
async def test_a_shutdown_during_the_build_ends_the_load(name: str, wait: bool) -> None:
    gate = Gate()
    backend = Probe(build=gate)
    encoder = AsyncVisionEncoder(backend, name=name)
    loading = asyncio.create_task(asyncio.to_thread(encoder.load, "a model"))
    await gate.reached()
    encoder.shutdown(wait=False)
    closing = asyncio.create_task(asyncio.to_thread(encoder.shutdown, wait))
    gate.open()
    with pytest.raises(EncoderUnavailable, match="shut down"):
        await loading
    await closing
    assert live_threads(name) == []
    assert backend.calls == ["build", "close"]
    with pytest.raises(EncoderUnavailable, match=r"after shutdown\(\)"):
        await encoder.encode(["image"])


@every_way_to_load
async def test_a_shutdown_just_before_the_build_ends_the_load_too(
    name: str, load: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Probe()
    encoder = AsyncVisionEncoder(backend, name=name)
    start, astart = ThreadedMicroBatcher.start, ThreadedMicroBatcher.astart

    def late_start(batcher: ThreadedMicroBatcher[Any, Any]) -> None:
        encoder.shutdown(wait=False)  # 1. another thread's; 2. our load goes on
        start(batcher)

    async def late_astart(batcher: ThreadedMicroBatcher[Any, Any]) -> None:
        encoder.shutdown(wait=False)
        await astart(batcher)

    monkeypatch.setattr(ThreadedMicroBatcher, "start", late_start)
    monkeypatch.setattr(ThreadedMicroBatcher, "astart", late_astart)
    with pytest.raises(EncoderUnavailable, match="shut down during load"):
        await load(encoder)
    assert live_threads(name) == []
    assert backend.calls in ([], ["build", "close"])


@every_way_to_close
async def test_a_shutdown_during_preprocess_answers_at_once(close: Way) -> None:
    gate = Gate()
    backend = Probe(gate.before(Preprocessed))
    encoder = AsyncVisionEncoder(backend)
    await encoder.aload("a model")
    requests = [asyncio.create_task(encoder.encode([name, f"{name}, too"])) for name in "ab"]
    await gate.reached()
    closing = asyncio.create_task(close(encoder))
    for request in requests:  # while the first preprocess is still at the gate
        with pytest.raises(EncoderUnavailable, match="shut down while the request was being preprocessed"):
            await asyncio.wait_for(request, LIMIT_S)
    gate.open()
    await closing
    assert backend.begun == ["a"]
    assert backend.calls == ["build", "close"]


@every_way_to_close
async def test_a_shutdown_during_a_forward_delivers_it_and_fails_what_waits(close: Way) -> None:
    gate = Gate()
    backend = Probe(refusing(Preprocessed), forward=gate)
    encoder = AsyncVisionEncoder(backend)
    await encoder.aload("a model")
    running = asyncio.create_task(encoder.encode(["running"]))
    await gate.reached()
    waiting = asyncio.create_task(encoder.encode(["waiting"]))
    await queued(encoder)
    closing = asyncio.create_task(close(encoder))
    with pytest.raises(EncoderUnavailable):
        await asyncio.wait_for(waiting, LIMIT_S)
    gate.open()
    assert await running == seen("running")
    await closing
    assert backend.batches == [["running"]]


async def test_aclose_lets_the_event_loop_go_on() -> None:
    gate = Gate()
    encoder = AsyncVisionEncoder(Bare(close=gate))
    await encoder.aload("a model")
    closing = asyncio.create_task(encoder.aclose())
    await gate.reached()  # the loop that waits here is the one that closes
    assert not closing.done()
    gate.open()
    await closing


async def test_a_caller_who_leaves_aclose_does_not_stop_the_closing(name: str) -> None:
    gate = Gate()
    backend = Probe(close=gate)
    encoder = AsyncVisionEncoder(backend, name=name)
    await encoder.aload("a model")
    closing = asyncio.create_task(encoder.aclose())
    await gate.reached()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    gate.open()
    await encoder.aclose()
    assert live_threads(name) == []
    assert backend.calls == ["build", "close"]


def test_an_aclose_that_gave_up_leaves_nothing_to_happen_on_its_loop(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    encoder = AsyncVisionEncoder(Probe(gate.before(Preprocessed)), "a model", name=name, join_timeout_s=0.05)

    async def main() -> None:
        async with encoder:
            request = asyncio.create_task(encoder.encode(["stuck"]))
            await gate.reached()
            request.cancel()

    asyncio.run(main())
    assert ["still runs" in message for message in caplog.messages] == [True]
    gate.open()
    asyncio.run(ended(name))
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("way", ["shutdown", "shutdown without waiting", "aclose"])
@pytest.mark.parametrize("place", ["preprocess", "forward"])
async def test_shutdown_may_be_called_by_the_backend_itself(
    name: str, caplog: pytest.LogCaptureFixture, place: str, way: str
) -> None:
    def shut_down() -> None:
        if way == "aclose":
            asyncio.run(encoder.aclose())
        else:
            encoder.shutdown(wait=way == "shutdown")

    def preprocess(raw: str) -> Preprocessed[str]:
        if place == "preprocess":
            shut_down()
        return Preprocessed(raw)

    def forward(_: list[str]) -> None:
        if place == "forward":
            shut_down()

    backend = Probe(preprocess, forward=forward)
    encoder: Encoder = AsyncVisionEncoder(backend, name=name)
    await encoder.aload("a model")
    request = asyncio.create_task(encoder.encode(["image"]))
    if place == "preprocess":
        with pytest.raises(EncoderUnavailable):
            await asyncio.wait_for(request, LIMIT_S)
    else:
        assert await asyncio.wait_for(request, LIMIT_S) == seen("image")
    await encoder.aclose()
    assert caplog.messages == []  # nobody waited for itself
    assert live_threads(name) == []
    assert backend.calls[-1] == "close"


@pytest.mark.parametrize("answers_before", range(20))
def test_everyone_gets_an_answer_when_encodes_race_a_shutdown(name: str, answers_before: int) -> None:
    backend = Probe(preprocess_concurrency=2, max_batch_items=3)
    encoder = AsyncVisionEncoder(backend, name=name)
    encoder.load("a model")
    answered = threading.Semaphore(0)

    async def one(number: int) -> None:
        with contextlib.suppress(EncoderUnavailable):
            assert await encoder.encode([number, -number]) == seen(number, -number)
        answered.release()

    async def race(loop_number: int) -> None:
        if loop_number == 0:  # this one plays the closer
            for _ in range(answers_before):
                await asyncio.to_thread(answered.acquire)
            await encoder.aclose()
        else:
            await asyncio.wait_for(asyncio.gather(*map(one, range(20))), LIMIT_S)

    in_three_loops(race)
    assert live_threads(name) == []
    assert backend.calls[-1] == "close"


async def test_an_error_of_close_is_logged_and_hurts_nobody(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = AsyncVisionEncoder(Bare(close=raising(RuntimeError("still in use"))), name=name)
    await encoder.aload("a model")
    await encoder.aclose()
    assert live_threads(name) == []
    assert "still in use" in caplog.text


@every_way_to_close
async def test_shutdown_returns_when_the_backend_is_closed(close: Way) -> None:
    gate = Gate()
    closed: list[bool] = []
    backend = Bare(close=gate.before(lambda: closed.append(True)))
    encoder = AsyncVisionEncoder(backend)
    await encoder.aload("a model")
    closing = asyncio.create_task(close(encoder))
    await gate.reached()
    gate.open()
    await closing
    assert closed == [True]
