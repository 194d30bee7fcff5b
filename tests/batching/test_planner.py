"""What goes into the next batch: the promises of ``retinue.batching.planner``."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retinue.batching.memory import Ceilings
from retinue.batching.planner import LOOK_AHEAD, MAX_TIMES_PASSED, Limits, Waiting, Work
from retinue.errors import InvalidInput

HUGE = 10**30

at_any_speed = settings(deadline=None)  # whatever else keeps the machine busy


def queue(*costs: int, keys: list[Hashable] | None = None) -> Waiting:
    """Works named by their position: 0, 1, 2, …"""
    waiting = Waiting()
    for number, cost in enumerate(costs):
        waiting.add((number, cost, None, 0), keys[number] if keys else None)
    return waiting


def names(works: list[Work]) -> list[Any]:
    return [work[0] for work in works]


def next_batch(waiting: Waiting, limits: Limits) -> list[Any]:
    plan = waiting.plan(limits)
    waiting.claim(plan)
    return names(plan.works)


def all_batches(waiting: Waiting, limits: Limits) -> list[list[Any]]:
    batches = []
    while waiting:
        batches.append(next_batch(waiting, limits))
    return batches


# ---- Limits: checked at birth


@pytest.mark.parametrize("name", ["max_batch_cost", "max_batch_items"])
@pytest.mark.parametrize("value", [True, False, 0, -1, 1.5, 2.0, float("nan"), float("inf"), "3", [3]])
def test_a_cap_that_is_no_positive_int_is_refused_by_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a positive int or None, got ") as refusal:
        Limits(**{name: value})
    assert repr(value) in str(refusal.value)


def test_numpy_caps_are_taken_as_plain_ints() -> None:
    limits = Limits(np.int32(8), np.int64(2), (np.int64(4), np.int64(8)))  # type: ignore[arg-type]
    assert (limits.max_batch_cost, limits.max_batch_items, limits.buckets) == (8, 2, (4, 8))
    assert {type(limits.max_batch_cost), type(limits.max_batch_items), *map(type, limits.buckets)} == {int}


@pytest.mark.parametrize("buckets", [(4, 2), (2, 2), (2, 4, 3)])
def test_buckets_that_do_not_increase_are_refused(buckets: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"buckets must be increasing positive ints, got \["):
        Limits(buckets=buckets)


@pytest.mark.parametrize("rung", [0, -1, True, 1.5, "2", None])
def test_a_bucket_that_is_no_positive_int_is_refused(rung: Any) -> None:
    with pytest.raises(ValueError, match="buckets must be increasing positive ints, got"):
        Limits(buckets=(rung, 4))


@pytest.mark.parametrize("cap", [3, 5])
def test_the_last_bucket_must_be_the_cap(cap: int) -> None:
    with pytest.raises(ValueError, match=f"last of buckets must equal max_batch_cost, got 4 and {cap}"):
        Limits(max_batch_cost=cap, buckets=(2, 4))


def test_buckets_alone_set_the_cap() -> None:
    assert Limits(buckets=(2, 4)) == Limits(max_batch_cost=4, buckets=(2, 4))


@pytest.mark.parametrize("none", [None, (), []])
def test_no_buckets_set_no_cap(none: Any) -> None:
    assert Limits(buckets=none) == Limits()


# ---- Limits: which costs enter


@pytest.mark.parametrize("cost", [1, 10, np.int8(10), np.int64(1), np.uint16(3)])
def test_whole_costs_within_the_cap_enter_as_plain_ints(cost: Any) -> None:
    admitted = Limits(max_batch_cost=10).admit(cost, 0, 1)
    assert (type(admitted), admitted) == (int, int(cost))


@pytest.mark.parametrize("cap", [None, 10])
@pytest.mark.parametrize(
    "cost",
    [
        True,
        False,
        np.True_,
        0,
        -1,
        np.int64(0),
        2.5,
        2.0,
        np.float32(2),
        float("nan"),
        float("inf"),
        "3",
        None,
    ],
)
def test_a_cost_that_is_no_positive_int_is_refused_naming_item_and_value(cap: int | None, cost: Any) -> None:
    with pytest.raises(InvalidInput) as refusal:
        Limits(max_batch_cost=cap).admit(cost, 1, 3)
    assert str(refusal.value) == f"item 2 of 3: a cost must be a positive int, got {cost!r}"


@pytest.mark.parametrize("cost", [11, HUGE, np.int64(11)])
def test_what_never_fits_is_refused_naming_the_setting_and_what_it_would_need(cost: Any) -> None:
    with pytest.raises(InvalidInput) as refusal:
        Limits(max_batch_cost=10).admit(cost, 1, 3, "image")
    assert str(refusal.value) == (
        f"image 2 of 3 costs {cost}, which exceeds max_batch_cost=10; it would need max_batch_cost={cost}"
    )


def test_without_a_cap_any_cost_enters() -> None:
    assert Limits().admit(HUGE, 0, 1) == HUGE


@at_any_speed
@given(st.sets(st.integers(1, 60), min_size=1), st.data())
def test_the_rung_is_the_smallest_bucket_that_holds_the_cost(buckets: set[int], data: st.DataObject) -> None:
    cost = data.draw(st.integers(1, max(buckets)))
    assert Limits(buckets=tuple(sorted(buckets))).rung(cost) == min(b for b in buckets if b >= cost)


def test_without_buckets_there_is_no_rung() -> None:
    assert Limits(max_batch_cost=8).rung(3) is None


# ---- Waiting: examples


@pytest.mark.parametrize(
    ("costs", "limits", "batches"),
    [
        ([1, 1, 1], Limits(), [[0, 1, 2]]),
        ([1000] * 4, Limits(), [[0, 1, 2, 3]]),
        ([3, 3, 1], Limits(max_batch_cost=5), [[0, 2], [1]]),
        ([5, 5], Limits(max_batch_cost=5), [[0], [1]]),
        ([2, 3], Limits(max_batch_cost=5), [[0, 1]]),
        ([1] * 5, Limits(max_batch_items=2), [[0, 1], [2, 3], [4]]),
        ([4, 4, 4, 1], Limits(max_batch_cost=9, max_batch_items=2), [[0, 1], [2, 3]]),
        ([6, 7, 4], Limits(max_batch_cost=10), [[0, 2], [1]]),
        ([4, 3, 6], Limits(max_batch_cost=10), [[0, 2], [1]]),  # the last that fits gives way to a larger one
        ([4, 1, 6, 5], Limits(max_batch_cost=10), [[0, 2], [1, 3]]),
        ([5, 4, 1, 1, 5], Limits(max_batch_cost=10), [[0, 1, 2], [3, 4]]),  # but not where nothing is left
        ([5, 6, 1, 1, 1], Limits(max_batch_cost=10, max_batch_items=2), [[0, 2], [1, 3], [4]]),
        ([HUGE, 1, HUGE], Limits(max_batch_cost=HUGE), [[0], [1], [2]]),
    ],
)
def test_batches_by_example(costs: list[int], limits: Limits, batches: list[list[int]]) -> None:
    assert all_batches(queue(*costs), limits) == batches


def test_costs_that_pair_up_need_four_calls_not_six() -> None:
    batches = all_batches(queue(7, 6, 3, 4, 7, 6, 3, 4), Limits(max_batch_cost=10))
    assert batches == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_one_request_of_forty_counts_as_forty() -> None:
    batches = all_batches(queue(*[1] * 40), Limits(max_batch_cost=16))
    assert [len(batch) for batch in batches] == [16, 16, 8]


def test_keys_take_turns_by_their_oldest() -> None:
    waiting = queue(*[1] * 6, keys=["a", "b", "a", "c", "b", "a"])
    assert all_batches(waiting, Limits(max_batch_items=2)) == [[0, 2], [1, 4], [3], [5]]


def test_a_key_that_comes_back_waits_for_those_that_were_older() -> None:
    waiting = queue(1, 1, keys=["a", "b"])
    assert next_batch(waiting, Limits()) == [0]
    waiting.add((2, 1, None, 0), "a")
    assert [next_batch(waiting, Limits()), next_batch(waiting, Limits())] == [[1], [2]]


def test_equal_keys_of_different_types_share_a_batch() -> None:
    assert all_batches(queue(1, 1, 1, keys=[1, 1.0, True]), Limits()) == [[0, 1, 2]]


def test_after_so_many_batches_nothing_overtakes_what_was_passed_over() -> None:
    sixes = MAX_TIMES_PASSED + 2
    costs = [6] * sixes + [7] + [4] * sixes  # a 4 fits beside a 6, and each such pair passes the 7 over
    batches = all_batches(queue(*costs), Limits(max_batch_cost=10))
    by_cost = [[costs[number] for number in batch] for batch in batches]
    assert by_cost == [[6, 4]] * MAX_TIMES_PASSED + [[6], [6], [7], [4, 4]]


def test_whose_turn_it_is_gives_way_to_no_larger_one() -> None:
    sixes = MAX_TIMES_PASSED + 2
    costs = [6] * sixes + [3] + [4] * sixes  # a 4 fills what room a 6 leaves, where the 3 would not
    batches = all_batches(queue(*costs), Limits(max_batch_cost=10))
    by_cost = [[costs[number] for number in batch] for batch in batches]
    assert by_cost == [[6, 4]] * MAX_TIMES_PASSED + [[6], [6, 3], [4, 4]]


def test_waiting_behind_a_batch_is_not_being_passed_over() -> None:
    limits = Limits(max_batch_cost=10)
    waiting = queue(*[9] * (MAX_TIMES_PASSED + 3))
    for number in range(MAX_TIMES_PASSED + 1):
        assert next_batch(waiting, limits) == [number]
    waiting.add(("late", 1, None, 0))
    assert next_batch(waiting, limits) == [MAX_TIMES_PASSED + 1, "late"]


def test_planning_looks_a_bounded_way_behind_the_first_misfit() -> None:
    misfits = [10] * (LOOK_AHEAD + 1)
    limits = Limits(max_batch_cost=10)
    assert next_batch(queue(9, *misfits, 1), limits) == [0, len(misfits) + 1]
    assert next_batch(queue(9, *misfits, 10, 1), limits) == [0]


def test_the_largest_are_taken_first_of_a_bounded_number_behind_the_first_misfit() -> None:
    ones = [1] * (LOOK_AHEAD - 1)
    limits = Limits(max_batch_cost=10)
    assert next_batch(queue(5, 6, *ones, 5), limits) == [0, LOOK_AHEAD + 1]
    assert next_batch(queue(5, 6, *ones, 1, 5), limits) == [0, 2, 3, 4, 5, 6]


def test_behind_those_it_is_first_come_first_served_again() -> None:
    cap = LOOK_AHEAD + 3
    waiting = [1, cap, *[1] * LOOK_AHEAD]
    everyone_but_the_second = [0, *range(2, len(waiting))]
    number = len(waiting)
    fits = queue(*waiting, 1, 1, 1)
    assert next_batch(fits, Limits(max_batch_cost=cap)) == [*everyone_but_the_second, number, number + 1]
    misfit = queue(*waiting, 1, 2, 1)
    assert next_batch(misfit, Limits(max_batch_cost=cap)) == [*everyone_but_the_second, number]
    limits = Limits(max_batch_cost=cap, max_batch_items=len(waiting))
    assert next_batch(queue(*waiting, 1, 1, 1), limits) == [*everyone_but_the_second, number]


def log_uniform(low: int, high: int) -> Callable[[random.Random], int]:
    return lambda chance: round(math.exp(chance.uniform(math.log(low), math.log(high))))


def tiles(chance: random.Random) -> int:
    """1 to 12 of 256 tokens, and a thumbnail beside more than one."""
    count = chance.randint(1, 12)
    return 256 * (count + (count > 1))


@pytest.mark.parametrize(
    ("cost", "cap"),
    [(log_uniform(64, 1280), 4096), (log_uniform(64, 1280), 8192), (tiles, 8192), (lambda chance: 576, 4096)],
    ids=["visual tokens", "visual tokens, large cap", "tiles", "fixed"],
)
@pytest.mark.parametrize("seed", range(5))
def test_four_hundred_images_need_hardly_more_batches_than_their_sum_does(
    cost: Callable[[random.Random], int], cap: int, seed: int
) -> None:
    chance = random.Random(seed)
    costs = [cost(chance) for _ in range(400)]
    assert len(all_batches(queue(*costs), Limits(max_batch_cost=cap))) <= 1.05 * math.ceil(sum(costs) / cap)


def test_a_plan_is_a_function_of_what_waits_however_often_it_is_made() -> None:
    waiting = queue(6, 7, 4)
    plans = [waiting.plan(Limits(max_batch_cost=10)) for _ in range(3 * MAX_TIMES_PASSED)]
    assert all(plan == plans[0] for plan in plans)
    assert len(waiting) == 3


def test_what_left_is_not_planned_and_its_room_is_free() -> None:
    waiting = queue(9, 2)
    waiting.remove(0)
    assert waiting.cost == 2
    assert next_batch(waiting, Limits(max_batch_cost=10)) == [1]


@pytest.mark.parametrize(("arrival", "key"), [(0, "b"), (5, "a"), (0, None)])
def test_removing_what_does_not_wait_changes_nothing(arrival: int, key: Hashable) -> None:
    waiting = queue(1, keys=["a"])
    waiting.remove(arrival, key)
    waiting.remove(arrival, key)
    assert (len(waiting), waiting.cost) == (1, 1)


@pytest.mark.parametrize(
    ("costs", "limits", "full"),
    [
        ([1, 1], Limits(), False),
        ([1, 1], Limits(max_batch_items=2), True),
        ([1], Limits(max_batch_items=2), False),
        ([3, 2], Limits(max_batch_cost=5), True),
        ([3, 1], Limits(max_batch_cost=5), False),
        ([3, 9], Limits(max_batch_cost=10), True),
    ],
)
def test_a_batch_is_full_when_more_company_would_have_to_wait(
    costs: list[int], limits: Limits, full: bool
) -> None:
    assert queue(*costs).fills_a_batch(limits) is full


def test_only_the_oldest_key_counts_for_a_full_batch() -> None:
    assert not queue(1, 5, keys=["old", "new"]).fills_a_batch(Limits(max_batch_cost=5))


def test_the_oldest_is_the_oldest_of_all_keys() -> None:
    waiting = queue(1, 1, 1, keys=["a", "b", "a"])
    waiting.remove(0, "a")
    assert waiting.oldest()[0] == 1


# ---- Waiting: properties

limits_of_any_kind = st.builds(
    Limits,
    max_batch_cost=st.none() | st.integers(8, 20),
    max_batch_items=st.none() | st.integers(1, 6),
)
arrivals = st.lists(st.tuples(st.integers(1, 8), st.sampled_from(["a", "b", "c"])), max_size=40)
#: What happens to a queue: an arrival (cost, key), a departure (which of those that wait), or a batch.
events = st.lists(
    st.tuples(st.integers(1, 8), st.sampled_from(["a", "b"])) | st.integers(0, 30) | st.none(), max_size=120
)


@at_any_speed
@given(arrivals, limits_of_any_kind)
def test_each_batch_is_led_by_the_oldest_of_its_key_keeps_the_order_and_the_limits(
    works: list[tuple[int, str]], limits: Limits
) -> None:
    waiting = Waiting()
    for number, (cost, key) in enumerate(works):
        waiting.add((number, cost, None, 0), key)
    left = list(range(len(works)))
    while waiting:
        plan = waiting.plan(limits)
        waiting.claim(plan)
        batch = names(plan.works)
        costs = [works[number][0] for number in batch]
        assert batch[0] == left[0]
        assert batch == sorted(batch)
        assert {works[number][1] for number in batch} == {plan.key}
        assert plan.cost == sum(costs)
        assert limits.max_batch_cost is None or sum(costs) <= limits.max_batch_cost
        assert limits.max_batch_items is None or len(batch) <= limits.max_batch_items
        left = [number for number in left if number not in batch]
        assert len(waiting) == len(left)
        assert waiting.cost == sum(works[number][0] for number in left)
    assert not left


@at_any_speed
@given(arrivals, limits_of_any_kind)
def test_no_batch_is_emptier_than_first_come_first_served_and_equals_keep_their_order(
    works: list[tuple[int, str]], limits: Limits
) -> None:
    waiting = Waiting()
    for number, (cost, key) in enumerate(works):
        waiting.add((number, cost, None, 0), key)
    left = list(range(len(works)))
    while left:
        lane = [number for number in left if works[number][1] == works[left[0]][1]]
        sums = itertools.accumulate(works[number][0] for number in lane[: limits.max_batch_items])
        first_come = max(total for total in sums if total <= (limits.max_batch_cost or math.inf))
        batch = next_batch(waiting, limits)
        assert sum(works[number][0] for number in batch) >= first_come
        for left_out in set(lane).difference(batch):
            assert all(works[number][0] != works[left_out][0] for number in batch if number > left_out)
        left = [number for number in left if number not in batch]


@at_any_speed
@given(st.lists(st.integers(1, 8), max_size=60), st.integers(8, 20))
def test_what_could_still_join_a_batch_stands_far_behind_or_waits_for_its_turn(
    costs: list[int], cap: int
) -> None:
    """With less than ``MAX_TIMES_PASSED`` batches it is nobody's turn yet."""
    waiting = queue(*costs)
    left = list(range(len(costs)))
    for _ in range(MAX_TIMES_PASSED):
        if not left:
            return
        sums = itertools.accumulate(costs[number] for number in left)
        fitting = sum(total <= cap for total in sums)
        batch = next_batch(waiting, Limits(max_batch_cost=cap))
        room = cap - sum(costs[number] for number in batch)
        near, far = left[: fitting + 1 + LOOK_AHEAD], left[fitting + 1 + LOOK_AHEAD :]
        assert all(costs[number] > room for number in set(near).difference(batch))
        joined = [number for number in far if number in batch]
        assert joined == far[: len(joined)]
        left = [number for number in left if number not in batch]


@at_any_speed
@given(arrivals, st.integers(1, 20), limits_of_any_kind)
def test_below_a_ceiling_only_a_single_item_costs_more(
    works: list[tuple[int, str]], failed_cost: int, limits: Limits
) -> None:
    waiting, ceilings, served = Waiting(), Ceilings(), []
    ceilings.failed("a", failed_cost)
    for number, (cost, key) in enumerate(works):
        waiting.add((number, cost, None, 0), key)
    while waiting:
        plan = waiting.plan(limits, ceilings)
        waiting.claim(plan)
        assert plan.key != "a" or len(plan.works) == 1 or plan.cost <= max(1, failed_cost // 2)
        served += names(plan.works)
    assert sorted(served) == list(range(len(works)))


@at_any_speed
@given(events, limits_of_any_kind)
def test_nothing_is_lost_doubled_or_overtaken_too_often(
    happenings: list[tuple[int, str] | int | None], limits: Limits
) -> None:
    waiting = Waiting()
    here: dict[int, tuple[int, str]] = {}  # what waits by our own books
    overtaken: dict[int, int] = {}
    served: list[int] = []
    for happening in [*happenings, *[None] * len(happenings)]:
        if isinstance(happening, tuple):
            here[waiting.arrivals] = happening
            waiting.add((waiting.arrivals, happening[0], None, 0), happening[1])
        elif isinstance(happening, int):
            if here:
                arrival = list(here)[happening % len(here)]
                waiting.remove(arrival, here.pop(arrival)[1])
        elif here:
            head = min(here)
            key = here[head][1]
            batch = next_batch(waiting, limits)
            assert batch[0] == head
            assert all(here[arrival][1] == key for arrival in batch)
            for arrival in batch:
                del here[arrival]
            for arrival, (_, other) in here.items():
                if other == key and arrival < batch[-1]:
                    overtaken[arrival] = overtaken.get(arrival, 0) + 1
            served += batch
        assert (len(waiting), waiting.cost) == (len(here), sum(cost for cost, _ in here.values()))
        assert sorted(names(waiting.works())) == sorted(here)
    assert not waiting
    assert len(set(served)) == len(served)
    assert max(overtaken.values(), default=0) <= MAX_TIMES_PASSED
