"""What is run again after a failure: the promises of ``isolation`` that need no actor, and those that do."""

from __future__ import annotations

import random
import weakref
from collections.abc import Collection

import pytest

from retinue.batching.isolation import Piece, Retries
from retinue.batching.planner import Work
from retinue.errors import EncoderFailed

from .support import ByHand, Echo, Item, dead, error_of, tags

ERROR = ValueError("bad pixel")


class Owner:
    """Stands for a request: one for each work."""


def works(count: int) -> list[Work]:
    return [(index, 1, Owner(), 0) for index in range(count)]


def isolate(count: int, culprits: Collection[int]) -> tuple[int, set[int], set[int]]:
    """Further calls, items that failed, items that failed without a proof, of a batch with these culprits."""
    retries = Retries()
    batch = Piece(None, works(count), count)
    failed: set[int] = set()
    unproven: set[int] = set()
    if not retries.split(batch, ERROR):
        failed = {work[0] for work in batch.works}
    calls = 0
    while retries:
        for piece in retries.take_unproven():
            unproven |= {work[0] for work in piece.works}
        if not retries:
            break
        taken = retries.take(lambda _: True, lambda _: None)
        assert taken is not None
        calls += 1
        ids = {work[0] for work in taken.works}
        if ids.isdisjoint(culprits):
            retries.succeeded()
        elif not retries.split(taken, ERROR):
            (failed if len(ids) == 1 else unproven).update(ids)
    return calls, failed, unproven


def ceil_log2(count: int) -> int:
    return (count - 1).bit_length()


@pytest.mark.parametrize("count", range(2, 65))
def test_one_culprit_fails_alone_within_twice_the_logarithm(count: int) -> None:
    for culprit in range(count):
        calls, failed, unproven = isolate(count, {culprit})
        assert (failed, unproven) == ({culprit}, set())
        assert calls <= 2 * ceil_log2(count)


def test_several_culprits_keep_the_bound_and_nobody_else_fails_while_it_lasts() -> None:
    rng = random.Random(0)
    saved = 0
    for _ in range(2_000):
        count = rng.randint(2, 64)
        culprits = set(rng.sample(range(count), rng.randint(1, min(count, 6))))
        calls, failed, unproven = isolate(count, culprits)
        assert calls <= 4 * ceil_log2(count) + 4
        assert failed <= culprits <= failed | unproven
        saved += not unproven
    assert saved > 1_000  # most are resolved whole


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_small_batch_is_resolved_whole_whoever_is_to_blame(count: int) -> None:
    for mask in range(1, 2**count):
        culprits = {index for index in range(count) if mask >> index & 1}
        _, failed, unproven = isolate(count, culprits)
        assert (failed, unproven) == (culprits, set())


# ---- by hand


class Poisoned(Echo):
    """Raises for every batch that holds one of these."""

    def __init__(self, *poison: object) -> None:
        super().__init__(self._sting)
        self.poison = set(poison)

    def _sting(self) -> None:
        for tag in self.calls[-1]:
            if tag in self.poison:
                raise ValueError(f"bad pixel in {tag}")


async def test_of_a_failed_batch_only_the_culprit_fails_with_its_own_error_and_position() -> None:
    fn = Poisoned("bad")
    hand = ByHand(fn)
    good = [hand.submit(number) for number in range(5)]
    bad = hand.submit("before", "bad", "after")
    await hand.run_dry()
    assert [tags(await caller) for caller in good] == [[number] for number in range(5)]
    error = await error_of(bad)
    assert type(error) is EncoderFailed
    assert str(error) == "item 2 of 3: fn raised ValueError: bad pixel in bad"
    assert error.position == 1
    assert isinstance(error.__cause__, ValueError)
    assert len(fn.calls) - 1 <= 2 * 3


async def test_a_request_that_has_failed_has_none_of_its_items_run_again() -> None:
    fn = Poisoned("bad")
    hand = ByHand(fn)
    bad = hand.submit("bad", *["sibling"] * 7)
    good = hand.submit("good")
    await hand.run_dry()
    assert isinstance(await error_of(bad), EncoderFailed)
    assert tags(await good) == ["good"]
    alone = fn.calls.index(["bad"])
    assert all("sibling" not in call for call in fn.calls[alone + 1 :])


async def test_a_batch_of_one_request_is_not_run_again() -> None:
    fn = Poisoned("bad")
    hand = ByHand(fn)
    caller = hand.submit("good", "bad")
    await hand.run_dry()
    assert str(await error_of(caller)) == "items 1 and 2 of 2: fn raised ValueError: bad pixel in bad"
    assert len(fn.calls) == 1


async def test_a_fault_that_does_not_come_again_costs_nobody_anything() -> None:
    fn = Echo()
    fn.faults = [ValueError("once")]
    hand = ByHand(fn)
    callers = [hand.submit(number) for number in range(4)]
    await hand.run_dry()
    assert [tags(await caller) for caller in callers] == [[0], [1], [2], [3]]


async def test_pieces_run_before_what_came_later() -> None:
    fn = Poisoned("bad")
    hand = ByHand(fn)
    for tag in ("a", "bad"):
        hand.submit(tag)
    await hand.step()
    hand.submit("later")
    await hand.run_dry()
    assert fn.calls == [["a", "bad"], ["a"], ["bad"], ["later"]]


async def test_a_piece_whose_callers_have_left_is_not_run() -> None:
    fn = Poisoned("bad")
    hand = ByHand(fn)
    leaver, bad = hand.submit("leaver"), hand.submit("bad")
    await hand.step()
    leaver.cancel()
    await hand.run_dry()
    assert fn.calls == [["leaver", "bad"], ["bad"]]
    assert isinstance(await error_of(bad), EncoderFailed)


async def test_a_broken_backend_costs_one_call_a_batch_until_one_succeeds() -> None:
    fn = Echo()
    hand = ByHand(fn)
    spent = []
    for _ in range(5):
        fn.faults = [ValueError("broken") for _ in range(100)]
        callers = [hand.submit(number) for number in range(4)]
        before = len(fn.calls)
        await hand.run_dry()
        spent.append(len(fn.calls) - before)
        assert all([isinstance(await error_of(caller), EncoderFailed) for caller in callers])
    assert spent[2:] == [1, 1, 1]
    fn.faults = []
    healed = hand.submit("healed")
    await hand.run_dry()
    assert tags(await healed) == ["healed"]
    fn.faults = [ValueError("once")]
    callers = [hand.submit(number) for number in range(2)]
    await hand.run_dry()
    assert [tags(await caller) for caller in callers] == [[0], [1]]  # it splits again


async def test_may_repeat_false_runs_nothing_twice() -> None:
    fn = Poisoned("bad")
    hand = ByHand(fn, may_repeat=False)
    callers = [hand.submit("good"), hand.submit("bad")]
    await hand.run_dry()
    assert fn.calls == [["good", "bad"]]
    assert all([isinstance(await error_of(caller), EncoderFailed) for caller in callers])


async def test_a_close_between_two_pieces_answers_everybody() -> None:
    fn = Poisoned("bad")
    hand = ByHand(fn)
    callers = [hand.submit("a"), hand.submit("bad")]
    await hand.step()
    assert hand.batcher.pending().items == 2
    hand.batcher.shutdown(wait=False)
    assert [type(await error_of(caller)).__name__ for caller in callers] == ["EncoderUnavailable"] * 2
    assert hand.batcher.pending().items == 0
    assert not await hand.step()


async def test_what_waits_to_be_run_again_counts_as_pending() -> None:
    hand = ByHand(Poisoned("bad"), max_pending_cost=10)
    for tag in ("a", "bad"):
        hand.submit(tag, costs=[5])
    await hand.step()
    refused = hand.submit("more", costs=[1])
    assert "a cost of 10 is pending" in str(await error_of(refused))


@pytest.mark.usefixtures("quiet")
async def test_after_an_isolation_no_item_stays_referenced() -> None:
    fn = Poisoned("bad")
    hand = ByHand(fn)
    items = [Item(tag) for tag in ("a", "bad", "c")]
    watched = [weakref.ref(item) for item in items]
    callers = [hand.submit(item) for item in items]
    del items
    await hand.run_dry()
    error = await error_of(callers[1])
    del callers
    assert dead(*watched)
    assert isinstance(error, EncoderFailed)
