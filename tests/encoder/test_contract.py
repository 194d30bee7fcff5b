"""What an artifact must be: the promises of ``retinue.encoder.contract``, and that an encoder keeps them."""

from __future__ import annotations

import asyncio
import gc
import mmap
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from retinue import AsyncVisionEncoder, EncoderFailed, VisionEncoderBackend
from retinue.batching.outcome import Refused
from retinue.encoder import contract as contract_module
from retinue.encoder.contract import ArtifactContract

from .support import Gate

HIDDEN = 4
LIBRARIES: dict[str, Any] = {"torch": torch, "numpy": np}
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> Any:
    return LIBRARIES[request.param]


def rows(count: int = 2, value: float = 1.0) -> torch.Tensor:
    return torch.full((count, HIDDEN), value)


def told(result: Any) -> str:
    """The text of the error in place of an artifact."""
    assert isinstance(result, Refused), result
    assert type(result.error) is EncoderFailed
    return str(result.error)


def is_refused(artifact: Any, **declared: Any) -> bool:
    """Whether it is, by a contract that has seen no other."""
    return isinstance(ArtifactContract(**declared).checked([artifact])[0], Refused)


# -- form ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((3, 2), "float32", r"expected \(rows, 4\), got \(3, 2\)"),
        ((4,), "float32", r"expected \(rows, 4\), got \(4,\)"),
        ((), "float32", r"expected \(rows, 4\), got \(\)"),
        ((1, 2, 4), "float32", r"expected \(rows, 4\), got \(1, 2, 4\)"),
        ((0, 4), "float32", r"1 row or more: expected \(rows, 4\), got \(0, 4\)"),
        ((2, 0), "float32", r"expected \(rows, 4\), got \(2, 0\)"),
        ((2, 4), "float64", "expected float32, got float64"),
        ((2, 4), "int64", "expected float32, got int64"),
    ],
)
def test_an_artifact_of_another_form_is_refused_alone_with_what_was_expected_and_what_came(
    library: Any, shape: tuple[int, ...], dtype: str, message: str
) -> None:
    first, last = (library.ones((count, HIDDEN), dtype=library.float32) for count in (1, 5))
    bad = library.ones(shape, dtype=getattr(library, dtype))
    results = ArtifactContract(hidden_size=HIDDEN, dtype="float32").checked([first, bad, last])
    assert results[0] is first
    assert results[2] is last
    with pytest.raises(EncoderFailed, match=message):
        raise results[1].error


@pytest.mark.parametrize(
    "declared",
    [torch.bfloat16, "bfloat16", "torch.bfloat16"],
    ids=repr,
)
def test_a_dtype_is_known_by_its_name(declared: Any) -> None:
    assert not is_refused(rows().bfloat16(), dtype=declared)
    assert is_refused(rows(), dtype=declared)


@pytest.mark.parametrize(
    "declared", [torch.float32, np.float32, np.dtype("float32"), "float32", None], ids=repr
)
def test_a_dtype_of_one_library_is_that_of_the_other(library: Any, declared: Any) -> None:
    assert not is_refused(library.ones((2, HIDDEN), dtype=library.float32), dtype=declared)


@pytest.mark.parametrize("hidden_size", [0, -1, True, 4.0, "4"])
def test_a_width_that_is_none_is_refused_at_birth(hidden_size: Any) -> None:
    with pytest.raises(ValueError, match="hidden_size must be a positive int or None, got"):
        ArtifactContract(hidden_size=hidden_size)


class Frame:
    """What has a shape and is no array."""

    shape = (2, 3)


class Tensorish(Frame):
    dtype = "float32"

    def shape(self) -> tuple[int, int]:  # type: ignore[override]  # the case
        return (2, 3)


@pytest.mark.parametrize(
    "artifact",
    [None, 0, "", [float("nan")], {"rows": 1}, ("a", 1), Frame(), Tensorish(), ValueError("as a value")],
    ids=lambda artifact: type(artifact).__name__,
)
def test_what_is_no_array_passes_untouched(artifact: Any) -> None:
    assert ArtifactContract(hidden_size=HIDDEN, dtype="float32").checked([artifact])[0] is artifact


# -- one width, where none is declared -----------------------------------------------------------------


def widths_that_pass(*calls: Sequence[int]) -> list[list[int]]:
    """Of ``calls`` of one encoder with artifacts of those widths, what is delivered."""
    contract = ArtifactContract()
    return [
        [
            result.shape[1]
            for result in contract.checked([torch.ones(2, width) for width in widths])
            if not isinstance(result, Refused)
        ]
        for widths in calls
    ]


def test_the_first_width_is_the_width() -> None:
    assert widths_that_pass([4], [2], [4, 4], [5, 4]) == [[4], [], [4, 4], [4]]


@pytest.mark.parametrize("first_call", [[2, 4, 4], [4, 2, 4], [4, 4, 2]])
def test_in_the_first_call_most_decide(first_call: list[int]) -> None:
    assert widths_that_pass(first_call) == [[4, 4]]


def test_an_odd_first_artifact_costs_one_more_before_the_others_decide() -> None:
    assert widths_that_pass([2], [4], [4], [4], [2], [4]) == [[2], [], [4], [4], [], [4]]


def test_a_width_that_most_have_had_is_not_given_up_for_a_few() -> None:
    assert widths_that_pass([4] * 10, [2], [2] * 3, [4]) == [[4] * 10, [], [], [4]]


def test_what_was_expected_is_named_though_nobody_declared_it() -> None:
    contract = ArtifactContract()
    contract.checked([rows(), rows()])
    assert "expected (rows, 4), got (1, 9)" in told(contract.checked([torch.ones(1, 9)])[0])
    assert "expected (rows, hidden), got (9,)" in told(ArtifactContract().checked([torch.ones(9)])[0])


# -- finite values -------------------------------------------------------------------------------------


NOT_FINITE = [(torch.nan,), (torch.inf,), (-torch.inf,), (torch.inf, -torch.inf), (torch.nan, torch.inf)]


def spoilt(good: torch.Tensor, values: Sequence[float], place: int) -> torch.Tensor:
    bad = good.clone()
    for number, value in enumerate(values):
        bad.view(-1)[place - number] = value
    return bad


@pytest.mark.parametrize("place", [3, -1])
@pytest.mark.parametrize("values", NOT_FINITE)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_values_that_are_not_finite_are_refused(
    dtype: torch.dtype, values: tuple[float, ...], place: int
) -> None:
    good = torch.randn(70, 130).to(dtype)
    bad = spoilt(good, values, place)
    first, refused, last = ArtifactContract().checked([good, bad, good])
    assert first is good
    assert last is good
    assert "must be finite: expected no NaN and no infinity, got" in told(refused)
    if dtype is not torch.bfloat16:  # numpy has none
        assert is_refused(bad.numpy())
    assert not is_refused(bad, check_finite=False)


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_values_of_one_byte_are_checked_too(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    assert not is_refused(torch.full((300, 300), largest).to(dtype))
    refused = ArtifactContract().checked([spoilt(rows(300), [torch.nan], 5).to(dtype)])[0]
    assert "must be finite: expected no NaN and no infinity, got nan" in told(refused)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_finite_values_are_never_refused_for_a_sum_that_overflows(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    for finite in (
        torch.full((300, 300), largest, dtype=dtype),
        torch.full((300, 300), -largest, dtype=dtype),
        torch.tensor([[largest, -largest]] * 300, dtype=dtype),
    ):
        assert not is_refused(finite)
        if dtype is not torch.bfloat16:
            assert not is_refused(finite.numpy())


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "uint16", "int32", "int64", "uint64"])
def test_integers_are_finite(library: Any, dtype: str) -> None:
    kind = getattr(library, dtype)
    largest = 1 if dtype == "bool" else library.iinfo(kind).max
    assert not is_refused(library.full((300, 300), largest, dtype=kind))


def test_both_parts_of_complex_values_are_looked_at(library: Any) -> None:
    for value, refused in ((1 + 1j, False), (complex(1, torch.inf), True), (complex(torch.nan, 1), True)):
        assert is_refused(library.full((3, 3), value, dtype=library.complex64)) is refused


@given(
    st.sampled_from([np.float16, np.float32, np.float64]).flatmap(
        lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=2, max_dims=2, max_side=9))
    )
)
def test_exactly_what_is_not_finite_is_refused(array: Any) -> None:
    refused = not np.isfinite(array).all()
    assert is_refused(array) is refused
    assert is_refused(torch.from_numpy(array)) is refused


# -- what cannot be checked ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [torch.eye(HIDDEN).to_sparse(), np.array([[None] * HIDDEN]), np.array([["text"] * HIDDEN])],
    ids=["sparse", "objects", "text"],
)
def test_an_array_without_readable_values_is_refused_alone(bad: Any) -> None:
    good = rows()
    first, refused = ArtifactContract().checked([good, bad])
    assert first is good
    assert f"an artifact, a {type(bad).__name__}, cannot be checked" in told(refused)


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("CUDA error")], ids=repr)
def test_the_end_of_a_devices_memory_is_no_artifacts_fault(error: Exception) -> None:
    """It goes where it would have gone out of ``forward_batch``, which knows what to do about it."""

    class OnADevice(np.ndarray[Any, Any]):
        def min(self, *args: Any, **options: Any) -> Any:
            raise error

    with pytest.raises(type(error)) as caught:
        ArtifactContract().checked([np.ones((2, HIDDEN)).view(OnADevice)])
    assert caught.value is error


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_on_the_accelerator_it_is_the_same(dtype: torch.dtype) -> None:
    batch = torch.randn(3, 70, 130, device="cuda").to(dtype)
    own = batch[0].clone()
    kept, copied, refused = ArtifactContract().checked([own, batch[1], spoilt(own, [torch.nan], 7)])
    assert kept is own
    assert copied.device.type == "cuda"
    assert copied.untyped_storage().nbytes() == copied.nbytes
    assert torch.equal(copied, batch[1])
    assert "got nan" in told(refused)


# -- storage of its own --------------------------------------------------------------------------------


@pytest.mark.parametrize("check_finite", [True, False])
@pytest.mark.parametrize(
    "in_a_batch",
    [lambda batch: batch[1], lambda batch: batch.reshape(6, HIDDEN)[2:4], lambda batch: list(batch)[1]],
    ids=["index", "rows", "split"],
)
def test_keeping_one_images_rows_does_not_keep_the_batchs(
    library: Any, in_a_batch: Callable[[Any], Any], check_finite: bool
) -> None:
    batch = library.ones((3, 2, HIDDEN), dtype=library.float32)
    keeper = batch.untyped_storage() if library is torch else batch
    alive = weakref.ref(keeper)
    (artifact,) = ArtifactContract(check_finite=check_finite).checked([in_a_batch(batch)])
    assert artifact.tolist() == [[1.0] * HIDDEN] * 2
    del batch, keeper
    assert alive() is None


def test_what_a_tensor_shares_with_an_array_is_found() -> None:
    batch = torch.ones(3, 2, HIDDEN)
    alive = weakref.ref(batch.untyped_storage())
    (artifact,) = ArtifactContract().checked([batch[1].numpy()])
    del batch
    assert alive() is None
    assert artifact.tolist() == [[1.0] * HIDDEN] * 2


def test_an_array_in_memory_that_is_not_numpys_is_copied() -> None:
    memory = mmap.mmap(-1, 4096)
    (artifact,) = ArtifactContract().checked([np.frombuffer(memory, np.uint8, 2 * HIDDEN).reshape(2, HIDDEN)])
    memory.close()  # which fails while anything looks into it
    assert artifact.tolist() == [[0] * HIDDEN] * 2


@pytest.mark.parametrize(
    "scattered",
    [
        torch.arange(8.0).reshape(HIDDEN, 2).t(),
        torch.ones(2, 2 * HIDDEN)[:, ::2],
        torch.ones(1, HIDDEN).expand(3, HIDDEN),
        np.arange(8.0).reshape(HIDDEN, 2).T,
        np.ones((2, 2 * HIDDEN))[:, ::2],
        np.broadcast_to(np.ones((1, HIDDEN)), (3, HIDDEN)),
        np.ones((3, HIDDEN))[::-1],
    ],
    ids=lambda array: f"{type(array).__name__}{tuple(array.shape)}",
)
def test_what_is_not_contiguous_becomes_so(scattered: Any) -> None:
    (artifact,) = ArtifactContract(hidden_size=HIDDEN).checked([scattered])
    assert artifact.tolist() == scattered.tolist()
    assert artifact.is_contiguous() if isinstance(artifact, torch.Tensor) else artifact.flags.c_contiguous


def test_what_requires_a_gradient_is_detached_and_keeps_nothing_that_led_to_it() -> None:
    weight = torch.ones(HIDDEN, HIDDEN, requires_grad=True)
    alive = weakref.ref(weight)
    (artifact,) = ArtifactContract().checked([rows() @ weight])
    del weight
    assert not artifact.requires_grad
    assert artifact.tolist() == [[4.0] * HIDDEN] * 2
    assert alive() is None


# -- a buffer that is used again -----------------------------------------------------------------------

REUSED = "the backend reuses its output buffer"


def same(buffer: Any) -> Any:
    return buffer


def alias(buffer: Any) -> Any:
    return buffer[:]


def wrapped_anew(buffer: Any) -> Any:
    return torch.from_numpy(buffer if isinstance(buffer, np.ndarray) else buffer.numpy())


WAYS = [same, alias, wrapped_anew]


@pytest.mark.parametrize("handed_out", WAYS)
def test_an_artifact_where_one_of_an_earlier_call_still_is_is_an_error(
    library: Any, handed_out: Callable[[Any], Any]
) -> None:
    contract, buffer = ArtifactContract(), library.ones((2, HIDDEN))
    (held,) = contract.checked([handed_out(buffer)])
    assert held.shape == (2, HIDDEN)
    for _ in range(3):
        good = rows()
        refused, delivered = contract.checked([handed_out(buffer), good])
        assert REUSED in told(refused)
        assert delivered is good


def test_it_is_found_whichever_library_wraps_it() -> None:
    contract, buffer = ArtifactContract(), np.ones((2, HIDDEN))
    assert contract.checked([buffer])[0] is buffer
    assert REUSED in told(contract.checked([wrapped_anew(buffer)])[0])


def test_a_part_of_a_buffer_is_no_way_around_it(library: Any) -> None:
    contract, buffer = ArtifactContract(), library.ones((3, HIDDEN))
    (held,) = contract.checked([buffer])
    assert held is buffer
    assert REUSED in told(contract.checked([buffer[:2]])[0])


def test_parts_of_a_buffer_may_be_used_again_for_they_are_copied(library: Any) -> None:
    contract, buffer = ArtifactContract(), library.ones((3, HIDDEN))
    held = contract.checked([buffer[:1], buffer[1:]])
    buffer *= 2
    held += contract.checked([buffer[:1], buffer[1:]])
    assert [artifact.tolist() for artifact in held] == [
        [[value] * HIDDEN] * count for value in (1, 2) for count in (1, 2)
    ]


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_view_of_an_artifact_keeps_it_in_use(mode: Callable[[], Any]) -> None:
    with mode():
        contract, buffer = ArtifactContract(), rows(3)
        (artifact,) = contract.checked([alias(buffer)])
        kept = artifact[1:]
        del artifact
        assert REUSED in told(contract.checked([alias(buffer)])[0])
    assert kept.tolist() == [[1.0] * HIDDEN] * 2


def test_once_it_was_an_error_and_its_artifact_is_gone_a_buffers_values_are_copied(library: Any) -> None:
    contract, buffer = ArtifactContract(), library.ones((2, HIDDEN))
    held = contract.checked([alias(buffer)])
    assert REUSED in told(contract.checked([alias(buffer)])[0])
    held.clear()
    for value in (2, 3, 4):
        buffer[:] = value
        held += contract.checked([alias(buffer)])
    assert [artifact.tolist() for artifact in held] == [[[value] * HIDDEN] * 2 for value in (2, 3, 4)]


@pytest.mark.parametrize("handed_out", WAYS)
def test_within_one_call_artifacts_may_share(library: Any, handed_out: Callable[[Any], Any]) -> None:
    buffer = library.ones((2, HIDDEN))
    twins = [handed_out(buffer), handed_out(buffer)]
    results = ArtifactContract().checked(twins)
    assert results[0] is twins[0]
    assert results[1] is twins[1]


def test_an_address_that_was_freed_is_free() -> None:
    contract, memory = ArtifactContract(), np.ones((2, HIDDEN))
    for _ in range(3):  # three storages, one after the other, at one address
        artifact = torch.from_numpy(memory)
        assert contract.checked([artifact])[0] is artifact
        del artifact


class Frees:
    """No artifact of ours, but another thread, which lets go of what is held while a call is checked."""

    def __init__(self, held: list[Any]) -> None:
        self._held = held

    @property
    def shape(self) -> None:
        self._held.clear()


def test_the_death_of_one_artifact_does_not_hide_the_next_at_its_address() -> None:
    contract, memory = ArtifactContract(), np.ones((2, HIDDEN))
    held = contract.checked([torch.from_numpy(memory)])
    held = contract.checked([Frees(held), torch.from_numpy(memory)])  # 1. the first dies, 2. the second comes
    assert not isinstance(held[1], Refused)
    assert REUSED in told(contract.checked([torch.from_numpy(memory)])[0])  # 3. hears of the first's death


def test_what_was_refused_does_not_count_as_in_use(library: Any) -> None:
    contract, buffer = ArtifactContract(), library.full((2, HIDDEN), library.nan)
    assert "must be finite" in told(contract.checked([buffer])[0])
    buffer[:] = 1
    assert contract.checked([buffer])[0] is buffer


# -- nothing is kept -----------------------------------------------------------------------------------


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
def test_nothing_of_an_artifact_is_kept_whatever_became_of_it(library: Any) -> None:
    contract = ArtifactContract(hidden_size=HIDDEN)
    shared = library.ones((2, HIDDEN))
    contract.checked([held := shared[:]])
    artifacts = [
        library.ones((2, HIDDEN)),
        library.ones((9, HIDDEN))[2:],
        library.ones((2, 3)),
        library.full((2, HIDDEN), library.nan),
        shared[:],
        np.array([[None] * HIDDEN]),
    ]
    watched = [weakref.ref(artifact) for artifact in artifacts]
    results = contract.checked(artifacts)
    refused = [result for result in results if isinstance(result, Refused)]
    watched += [weakref.ref(result) for result in results if not isinstance(result, Refused)]
    assert len(refused) == 4
    del artifacts, results, held
    assert [alive() for alive in watched] == [None] * 8
    assert [(each.error.__traceback__, each.error.__context__) for each in refused] == [(None, None)] * 4


def watches() -> int:
    """How many weak references contracts hold, this test's and none that is garbage."""
    gc.collect()
    return sum(
        issubclass(type(thing), weakref.ref) and type(thing).__module__ == contract_module.__name__
        for thing in gc.get_objects()
    )


def test_of_the_dead_not_even_their_addresses_are_kept(library: Any) -> None:
    contract = ArtifactContract()
    before = watches()
    held = contract.checked([library.ones((2, HIDDEN)) for _ in range(100)])
    assert watches() == before + 100
    held.clear()
    contract.checked([])
    assert watches() == before


# -- behind an encoder ---------------------------------------------------------------------------------


class Table(VisionEncoderBackend[str, str, Any]):
    """Encodes a name to what is in its table, once it is told to. Knows its width since its build."""

    max_batch_items = 8

    def __init__(self, table: dict[str, Any], whole: Callable[[list[Any]], Any] = list) -> None:
        self.gate = Gate()
        self.batches: list[list[str]] = []
        self._table = table
        self._whole = whole

    def build(self, model_id: str) -> None:
        self.hidden_size = HIDDEN

    def forward_batch(self, items: list[str], target_bucket: int | None = None) -> Any:
        self.batches.append(items)
        self.gate()
        return self._whole([self._table[item] for item in items])


BAD: dict[str, tuple[Any, str]] = {
    "half the width": (torch.ones(2, HIDDEN // 2), r"expected \(rows, 4\), got \(2, 2\)"),
    "1-D": (torch.ones(HIDDEN), r"expected \(rows, 4\), got \(4,\)"),
    "3-D": (torch.ones(1, 2, HIDDEN), r"expected \(rows, 4\), got \(1, 2, 4\)"),
    "float64": (rows().double(), "expected float32, got float64"),
    "int": (rows().int(), "expected float32, got int32"),
    "NaN": (rows(value=torch.nan), "expected no NaN and no infinity, got nan"),
    "Inf": (rows(value=torch.inf), "expected no NaN and no infinity, got inf"),
    "0 rows": (rows(0), r"1 row or more: expected \(rows, 4\), got \(0, 4\)"),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_artifact_fails_its_own_request_and_not_the_good_one_beside_it(name: str) -> None:
    """FC-30: wrong width, rank, dtype, content or number of rows."""
    artifact, message = BAD[name]
    backend = Table({"bad": artifact, "good": rows(), "first": rows(1)})
    backend.dtype = torch.float32
    async with AsyncVisionEncoder(backend, "a model") as encoder:
        first = asyncio.create_task(encoder.encode(["first"]))
        await backend.gate.reached()
        bad = asyncio.create_task(encoder.encode(["good", "bad"]))
        good = asyncio.create_task(encoder.encode(["good"]))
        await asyncio.sleep(0)  # both take their first step, into the queue
        backend.gate.open()
        await first
        with pytest.raises(EncoderFailed, match=f"2 of 2: .*{message}"):
            await bad
        assert [each.tolist() for each in await good] == [rows().tolist()]
    assert backend.batches == [["first"], ["good", "bad", "good"]]


GOOD = {
    "a list of floats": [1.0, 2.0],
    "requires grad": rows().requires_grad_(),
    "not contiguous": torch.ones(HIDDEN, 2).t(),
    "numpy": np.ones((2, HIDDEN), np.float32),
}


@pytest.mark.parametrize("name", GOOD)
async def test_an_artifact_that_can_be_put_right_is_delivered(name: str) -> None:
    """FC-30: a list of floats, a gradient, another layout."""
    backend = Table({"odd": GOOD[name]})
    backend.gate.open()
    async with AsyncVisionEncoder(backend, "a model") as encoder:
        (artifact,) = await encoder.encode(["odd"])
    expected: Any = GOOD[name]
    if isinstance(artifact, torch.Tensor):
        assert artifact.is_contiguous()
        assert not artifact.requires_grad
    assert np.array_equal(np.asarray(artifact), np.asarray(getattr(expected, "detach", lambda: expected)()))


async def test_of_artifacts_that_come_as_one_array_each_is_its_callers_alone() -> None:
    backend = Table({str(n): rows(value=float(n)) for n in range(3)}, torch.stack)
    backend.gate.open()
    async with AsyncVisionEncoder(backend, "a model") as encoder:
        artifacts = await encoder.encode(["0", "1", "2"])
    assert [artifact.tolist() for artifact in artifacts] == [rows(value=n).tolist() for n in range(3)]
    assert {artifact.untyped_storage().nbytes() for artifact in artifacts} == {rows().nbytes}


async def test_a_backend_that_hands_out_its_buffer_again_is_told_so() -> None:
    backend = Table({"picture": rows()})
    backend.gate.open()
    async with AsyncVisionEncoder(backend, "a model") as encoder:
        held = await encoder.encode(["picture"])
        with pytest.raises(EncoderFailed, match=REUSED):
            await encoder.encode(["picture"])
    assert len(held) == 1


async def test_a_backend_may_turn_the_look_at_values_off() -> None:
    backend = Table({"picture": rows(value=torch.nan)})
    backend.check_finite = False
    backend.gate.open()
    async with AsyncVisionEncoder(backend, "a model") as encoder:
        (artifact,) = await encoder.encode(["picture"])
    assert artifact.isnan().all()


async def test_a_declaration_that_makes_no_sense_fails_the_load() -> None:
    class Wide(Table):
        def build(self, model_id: str) -> None:
            self.hidden_size = 0

    with pytest.raises(ValueError, match="hidden_size must be a positive int or None, got 0"):
        await AsyncVisionEncoder(Wide({})).aload("a model")
