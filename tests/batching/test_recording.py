"""The trace of a batcher: what it says, and that nothing of it reaches those who are served."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import weakref
from pathlib import Path

import pytest

from retinue.batching import BatchRecord, RequestRecord, ThreadedMicroBatcher
from retinue.batching.planner import Limits
from retinue.batching.recording import Recorder, read_trace

from .support import Echo, Item, Seen, Watch, dead

BATCH = BatchRecord(
    id=1, items=2, requests=1, cost=5, key=None, bucket=8, oldest_wait_s=0.5, duration_s=0.25, outcome="ok"
)
REQUEST = RequestRecord(
    items=2,
    cost=5,
    ahead_items=0,
    ahead_cost=0,
    batches=(1,),
    wait_s=0.5,
    total_s=0.75,
    outcome="ok",
    arrived_s=100.0,
    costs=(2, 3),
    keys=(None, None),
)


class Both(Watch):
    """Keeps the records and has them written."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def on_batch(self, record: BatchRecord) -> None:
        super().on_batch(record)
        self._recorder.on_batch(record)

    def on_request(self, record: RequestRecord) -> None:
        super().on_request(record)
        self._recorder.on_request(record)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def record(path: Path, *records: BatchRecord | RequestRecord, limits: Limits | None = None) -> None:
    """One run that wrote these."""
    with Recorder(path, limits) as recorder:
        for one in records:
            if isinstance(one, BatchRecord):
                recorder.on_batch(one)
            else:
                recorder.on_request(one)


async def serve(path: str | Path, items: list[str]) -> None:
    """One run of a batcher that got these, one after the other."""
    with Recorder(path) as recorder:
        batcher: ThreadedMicroBatcher[str, Seen] = ThreadedMicroBatcher(Echo(), observer=recorder)
        async with batcher:
            for item in items:
                await batcher.submit([item])


async def test_what_a_batcher_did_can_be_read_again(path: Path) -> None:
    limits = Limits(8, None, (4, 8))
    with Recorder(path, limits) as recorder:
        both = Both(recorder)
        batcher: ThreadedMicroBatcher[str, Seen] = ThreadedMicroBatcher(
            Echo(), buckets=limits.buckets, observer=both
        )
        async with batcher:
            await batcher.submit(["a", "b"], [1, 2], ["k", "k"])
            await batcher.submit(["c"])
    trace = read_trace(path)
    assert trace.limits == limits
    assert trace.batches == both.batches
    shift_s = trace.requests[0].arrived_s - both.requests[0].arrived_s
    assert trace.requests == [one._replace(arrived_s=one.arrived_s + shift_s) for one in both.requests]
    assert abs(trace.requests[0].arrived_s - time.time()) < 60
    assert trace.torn == 0


def test_nothing_of_an_item_is_written(path: Path) -> None:
    asyncio.run(serve(path, ["what nobody else may see"]))
    assert len(read_trace(path).requests) == 1
    assert b"see" not in path.read_bytes()


def test_keys_become_text_and_no_key_stays_none(path: Path) -> None:
    batches = [BATCH._replace(key=key) for key in ((224, 224), 7, "k", None)]
    request = REQUEST._replace(keys=((224, 224), None))
    record(path, *batches, request)
    trace = read_trace(path)
    assert [batch.key for batch in trace.batches] == ["(224, 224)", "7", "k", None]
    assert trace.requests[0].keys == ("(224, 224)", None)


def test_a_later_run_goes_on_in_the_same_file(path: Path) -> None:
    record(path, BATCH, limits=Limits(5))
    record(path, REQUEST, limits=Limits(6))
    trace = read_trace(path)
    assert (len(trace.batches), len(trace.requests), trace.torn) == (1, 1, 0)
    assert trace.limits == Limits(6)


def test_a_line_that_a_crash_has_torn_is_skipped_and_counted(path: Path) -> None:
    record(path, BATCH, REQUEST)
    whole = path.read_bytes()
    start = whole.rstrip().rfind(b"\n") + 1
    for end in range(start + 1, len(whole) - 1):
        path.write_bytes(whole[:end])
        trace = read_trace(path)
        assert (len(trace.batches), len(trace.requests), trace.torn) == (1, 0, 1)
    record(path, REQUEST, limits=Limits(7))  # a run after the crash
    trace = read_trace(path)
    assert (trace.limits, len(trace.batches), len(trace.requests), trace.torn) == (Limits(7), 1, 1, 1)


def test_the_file_is_bounded(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Recorder(path, max_bytes=2000) as recorder:
        for _ in range(100):
            recorder.on_batch(BATCH)
    assert 1500 < path.stat().st_size <= 2000
    assert read_trace(path).torn == 0
    (message,) = caplog.messages
    assert "the file has reached max_bytes=2000" in message


def test_the_bound_is_on_all_runs_together(path: Path) -> None:
    record(path, *[BATCH] * 20)
    size = path.stat().st_size
    with Recorder(path, max_bytes=size + 100) as recorder:
        recorder.on_batch(BATCH)
    assert path.stat().st_size <= size + 100


async def test_a_full_disk_is_said_once_and_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    await serve("/dev/full", ["a"] * 200)
    (message,) = caplog.messages
    assert "recording to /dev/full has ended: OSError" in message


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a pipe that nobody reads")
def test_a_disk_that_does_not_keep_up_holds_nobody_up(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with contextlib.ExitStack() as stack:
        recorder = stack.enter_context(Recorder(path))
        stack.callback(os.close, reader)
        for _ in range(200_000):
            recorder.on_batch(BATCH)
            if caplog.messages:
                break
    (message,) = caplog.messages
    assert "the disk does not keep up" in message


def test_a_key_that_has_no_text_ends_the_recording_alone(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Mute:
        def __str__(self) -> str:
            raise RuntimeError("no words")

    record(path, BATCH, BATCH._replace(key=Mute()), BATCH)
    assert len(read_trace(path).batches) == 1
    (message,) = caplog.messages
    assert "RuntimeError: no words" in message


def test_what_comes_after_the_close_is_neither_recorded_nor_kept(path: Path) -> None:
    recorder = Recorder(path)
    recorder.on_batch(BATCH)
    recorder.close()
    key = Item()
    recorder.on_batch(BATCH._replace(key=key))
    recorder.close()
    assert len(read_trace(path).batches) == 1
    reference = weakref.ref(key)
    del key
    assert dead(reference)


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="directory"):
        Recorder(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is no trace"),
        (b"\x89PNG\r\n\x1a\n", "is no trace"),
        (b"[1]\n", "line 1 is not of a trace"),
        (b'{"kind":"batch"}\n', "line 1 is not of a trace"),
        (b'{"kind":"trace","version":99,"epoch_s":0}\n', "line 1 is not of a trace"),
        (b'{"kind":"trace","version":1,"epoch_s":0,"max_batch_cost":0}\n', "max_batch_cost must be"),
        (b'{"kind":"trace","version":1,"epoch_s":0}\n{"kind":"request","arrived_s":1}\n', "line 2 is not"),
    ],
)
def test_another_file_is_refused_in_words(path: Path, content: bytes, words: str) -> None:
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words):
        read_trace(path)
