"""Out of memory: what is recognized, how much smaller the next batches are, and how they grow again."""

from __future__ import annotations

import pytest
import torch

from retinue.batching.memory import CALLS_PER_RAISE, Ceilings, is_out_of_memory
from retinue.errors import EncoderFailed

from .support import ByHand, Echo, Watch, error_of, tags


def named(module: str, name: str, *bases: type[BaseException]) -> type[BaseException]:
    """A class as a library makes them, without the library."""
    return type(name, bases or (RuntimeError,), {"__module__": module})


FAIL = named("onnxruntime.capi.onnxruntime_pybind11_state", "Fail")
RUNTIME_EXCEPTION = named("onnxruntime.capi.onnxruntime_pybind11_state", "RuntimeException", Exception)
XLA = named("jaxlib._jax", "XlaRuntimeError")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        torch.cuda.OutOfMemoryError("any words"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
        RUNTIME_EXCEPTION("BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer"),
        FAIL("CUDA failure 2: out of memory ; GPU=0"),
        XLA("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4.00GiB."),
        named("cupy.cuda.memory", "OutOfMemoryError", MemoryError)("Out of memory allocating"),
    ],
    ids=lambda error: f"{type(error).__module__}.{type(error).__name__}",
)
def test_it_is_recognized(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("out of memory"),
        RuntimeError("shape mismatch"),
        KeyError("memory"),
        FAIL("invalid dimensions"),
        EncoderFailed("out of memory"),
    ],
    ids=lambda error: f"{type(error).__name__} {error}",
)
def test_other_errors_are_not(error: BaseException) -> None:
    assert not is_out_of_memory(error)


def test_a_failure_halves_and_successes_raise_slowly_until_it_is_forgotten() -> None:
    ceilings = Ceilings()
    ceilings.failed("key", 64)
    assert (ceilings.of("key"), ceilings.of("other"), ceilings.lowest()) == (32, None, 32)
    for _ in range(CALLS_PER_RAISE - 1):
        ceilings.succeeded("key", 32)
    assert ceilings.of("key") == 32
    ceilings.succeeded("key", 32)
    assert ceilings.of("key") == 36
    ceilings.succeeded("key", 64)  # as much as had failed
    assert ceilings.of("key") is None


def test_small_calls_say_nothing_about_the_ceiling() -> None:
    ceilings = Ceilings()
    ceilings.failed(None, 64)
    for _ in range(10 * CALLS_PER_RAISE):
        ceilings.succeeded(None, 16)
    assert ceilings.of(None) == 32


def test_an_item_that_failed_alone_takes_the_blame_from_the_cost() -> None:
    ceilings = Ceilings()
    ceilings.failed(None, 8)
    ceilings.settled()
    for cost in (4, 2):
        ceilings.failed(None, cost)
    ceilings.failed_alone(None)
    assert ceilings.of(None) == 4  # as it was before this batch


def test_so_many_keys_are_remembered_and_no_more() -> None:
    ceilings = Ceilings()
    for key in range(1_000):
        ceilings.failed(key, 8)
    assert sum(ceilings.of(key) is not None for key in range(1_000)) == 256
    assert ceilings.of(999) == 4


# ---- by hand


class Device(Echo):
    """Has room for so much; an item's tag is its cost."""

    def __init__(self, room: int) -> None:
        super().__init__(self._allocate)
        self.room = room
        self.released = 0

    def _allocate(self) -> None:
        if sum(self.calls[-1]) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def release(self) -> None:
        self.released += 1


async def test_a_batch_that_does_not_fit_is_run_in_parts_that_do() -> None:
    device, watch = Device(room=20), Watch()
    hand = ByHand(device, release_memory=device.release, observer=watch, max_batch_cost=64)
    callers = [hand.submit(4, costs=[4]) for _ in range(16)]
    await hand.run_dry()
    assert [tags(await caller) for caller in callers] == [[4]] * 16
    assert [sum(call) for call in device.calls] == [64, 32, 16, 16, 16, 16]
    assert device.released == 2
    assert [record.outcome for record in watch.batches] == ["out_of_memory"] * 2 + ["ok"] * 4
    assert [record.is_retry for record in watch.batches] == [False] + [True] * 5
    assert hand.batcher.pending().cost_ceiling == 16


async def test_it_is_remembered_for_the_batches_to_come() -> None:
    device = Device(room=20)
    hand = ByHand(device, max_batch_cost=64)
    for _ in range(2):
        for _ in range(16):
            hand.submit(4, costs=[4])
        await hand.run_dry()
    assert [sum(call) for call in device.calls] == [64, 32, *[16] * 8]


async def test_and_it_is_probed_upwards() -> None:
    device = Device(room=20)
    hand = ByHand(device, max_batch_cost=32)
    for _ in range(2):
        hand.submit(*[1] * 16)
    await hand.run_dry()
    device.room = 1_000
    for _ in range(16 * CALLS_PER_RAISE):
        hand.submit(*[1] * 64)
    await hand.run_dry()
    assert hand.batcher.pending().cost_ceiling is None
    assert sum(device.calls[-1]) == 32


async def test_one_item_that_alone_is_too_large_fails_alone_naming_its_cost() -> None:
    device = Device(room=20)
    hand = ByHand(device, max_batch_cost=64)
    small = [hand.submit(4, costs=[4]) for _ in range(4)]
    large = hand.submit(4, 30, costs=[4, 30])
    await hand.run_dry()
    assert [tags(await caller) for caller in small] == [[4]] * 4
    error = await error_of(large)
    assert type(error) is EncoderFailed
    assert str(error).startswith("item 2 of 2: out of memory at a cost of 30; fn raised OutOfMemoryError")
    assert hand.batcher.pending().cost_ceiling is None  # it was that item, not the cost


async def test_with_buckets_the_parts_get_their_own_rung() -> None:
    device = Device(room=8)
    hand = ByHand(device, buckets=(4, 8, 16))
    for _ in range(16):
        hand.submit(1)
    await hand.run_dry()
    assert device.buckets == [16, 8, 8]


async def test_may_repeat_false_fails_the_batch_and_remembers_the_ceiling() -> None:
    device = Device(room=20)
    hand = ByHand(device, may_repeat=False, max_batch_cost=32)
    first = [hand.submit(16, costs=[16]) for _ in range(2)]
    await hand.run_dry()
    assert all([isinstance(await error_of(caller), EncoderFailed) for caller in first])
    second = [hand.submit(16, costs=[16]) for _ in range(2)]
    await hand.run_dry()
    assert [tags(await caller) for caller in second] == [[16], [16]]


async def test_a_backends_own_opinion_counts() -> None:
    fn = Echo()
    fn.faults = [ValueError("arena exhausted")]
    hand = ByHand(fn, is_out_of_memory=lambda error: "exhausted" in str(error))
    caller = hand.submit(1, 2)
    await hand.run_dry()
    assert tags(await caller) == [1, 2]
    assert fn.calls == [[1, 2], [1], [2]]


async def test_release_memory_that_raises_costs_no_answer() -> None:
    device = Device(room=1)

    def release() -> None:
        raise RuntimeError("cannot")

    hand = ByHand(device, release_memory=release)
    caller = hand.submit(1, 1)
    await hand.run_dry()
    assert tags(await caller) == [1, 1]
