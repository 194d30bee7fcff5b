"""The books that schedules are compared with say no wherever a guarantee is broken."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .model import Books, Ending, Item, Request
from .schedule import Setup, specs_of


def books(setup: Setup, *requests: str) -> Books:
    """Of a batcher that has accepted these requests; their items count up from 0."""
    made = Books(setup, lambda: 0.0)
    made.started()
    for number, items in enumerate(requests):
        request = Request(number)
        for index, spec in enumerate(specs_of(items)):
            item = Item(len(made.items) + index, spec.key, spec.cost, spec.fault, request, index, 0.0)
            request.items.append(item)
        made.accept(request)
    return made


def begin(*numbers: int, bucket: int | None = None) -> Callable[[Books], None]:
    return lambda made: made.begin_call(numbers, bucket)


def call(ending: Ending, *numbers: int) -> Callable[[Books], None]:
    def act(made: Books) -> None:
        made.begin_call(numbers, None)
        made.end_call(ending)

    return act


def leave(number: int) -> Callable[[Books], None]:
    return lambda made: made.leave(made.requests[number])


BROKEN: list[tuple[str, Setup, list[str], list[Callable[[Books], object]]]] = [
    # Limits, keys, buckets
    ("costs 5, more than 4", Setup(max_batch_cost=4), ["a3", "a2"], [begin(0, 1)]),
    ("more than 1 items", Setup(max_batch_items=1), ["a1 a1"], [begin(0, 1)]),
    ("mixes keys", Setup(), ["a1 b1"], [begin(0, 1)]),
    ("target_bucket=4", Setup(max_batch_cost=4, buckets=(2, 4)), ["a2"], [begin(0, bucket=4)]),
    ("an empty call", Setup(), ["a1"], [begin()]),
    ("twice in one call", Setup(), ["a1"], [begin(0, 0)]),
    # Order
    ("item 0 .* has waited longest", Setup(), ["b1", "a1"], [begin(1)]),
    ("not in order of arrival", Setup(), ["a1 a1 a1"], [begin(0, 2, 1)]),
    ("first come, first served costs 2, more than", Setup(), ["a1 a1"], [begin(0)]),
    (
        "item 9 .* was overtaken by 9 batches",
        Setup(max_batch_cost=4),
        ["a3 " * 9 + "a2" + " a1" * 9],
        [call("ok", number, 10 + number) for number in range(9)],
    ),
    # One outcome, cancellation, one thread
    ("reached fn after its request was left", Setup(), ["a1"], [leave(0), begin(0)]),
    ("is answered and was called again", Setup(), ["a1"], [call("ok", 0), begin(0)]),
    ("two calls at once", Setup(max_batch_items=1), ["a1 a1"], [begin(0), begin(1)]),
    ("a call of a lost backend", Setup(), ["a1"], [Books.lose, begin(0)]),
    ("before on_start or after on_stop", Setup(), ["a1"], [Books.stopped, begin(0)]),
    ("on_start again", Setup(), [], [Books.started]),
    ("on_stop without on_start", Setup(), [], [Books.stopped, Books.stopped]),
    ("on_stop while a call runs", Setup(), ["a1"], [begin(0), Books.stopped]),
    ("got ok, and is not decided", Setup(), ["a1"], [lambda it: it.answered(it.requests[0], "ok")]),
    (
        "request 1 got failed, and is ok",
        Setup(),
        ["a1!", "a1"],
        [call("failed", 0, 1), call("ok", 1), lambda it: it.answered(it.requests[1], "failed")],
    ),
    # Isolation, memory, losses
    (
        "what failed and others",
        Setup(max_batch_items=2),
        ["a1", "a1", "a1"],
        [call("failed", 0, 1), begin(0, 2)],
    ),
    (
        "request 0 were neither run again nor answered",
        Setup(max_batch_items=2),
        ["a1", "a1", "a1"],
        [call("failed", 0, 1), begin(2)],
    ),
    (
        "5 further calls for a batch of 3, at most 4",
        Setup(),
        ["a1!", "a1", "a1"],
        [call("failed", 0, 1, 2), *[call("failed", 0, 1)] * 5],
    ),
    (
        "13 further calls for a batch of 3, at most 12",
        Setup(),
        ["a1!", "a1!", "a1"],
        [call("failed", 0, 1, 2), *[call("failed", 0, 1)] * 13],
    ),
    ("after its request was failed", Setup(isolate=False), ["a1", "a1"], [call("failed", 0, 1), begin(0)]),
    ("after running out of memory", Setup(), ["a2 a2"], [call("out_of_memory", 0, 1), begin(0, 1)]),
    (
        "cost as much as what ran out of memory",
        Setup(max_batch_items=2),
        ["a2 a2", "a2 a2"],
        [call("out_of_memory", 0, 1), call("ok", 0), call("ok", 1), begin(2, 3)],
    ),
    (
        "after its request was failed",
        Setup(),
        ["a1"],
        [
            call("lost", 0),
            Books.stopped,
            Books.started,
            call("lost", 0),
            Books.stopped,
            Books.started,
            begin(0),
        ],
    ),
    # What is pending, and when the thread may sleep
    ("1 items are said to wait", Setup(), ["a1 a1"], [lambda it: it.check_pending(1, 2, 0)]),
    ("a cost of 1 is said to wait", Setup(), ["a2"], [lambda it: it.check_pending(1, 1, 0)]),
    ("a cost of 2 is said to run", Setup(), [], [lambda it: it.check_pending(0, 0, 2)]),
    ("4 is pending, more than 3", Setup(max_pending_cost=3), ["a4"], [lambda it: it.check_pending(1, 4, 0)]),
    ("asleep while", Setup(), ["a1"], [lambda it: it.check_asleep(None)]),
    ("asleep for 2.0 s", Setup(max_wait_s=1.0), ["a1"], [lambda it: it.check_asleep(2.0)]),
    ("asleep for 0.5 s", Setup(max_wait_s=None), ["a1"], [lambda it: it.check_asleep(0.5)]),
    (
        "asleep while a full batch waits",
        Setup(max_wait_s=1.0, max_batch_items=1),
        ["a1"],
        [lambda it: it.check_asleep(1.0)],
    ),
    ("asleep when closed", Setup(), [], [lambda it: it.close(False), lambda it: it.check_asleep(None)]),
]


@pytest.mark.parametrize(("text", "setup", "requests", "acts"), BROKEN, ids=[case[0] for case in BROKEN])
def test_the_last_of_these_acts_breaks_a_guarantee(
    text: str, setup: Setup, requests: list[str], acts: list[Callable[[Books], object]]
) -> None:
    made = books(setup, *requests)
    for act in acts[:-1]:
        act(made)
    with pytest.raises(AssertionError, match=text):
        acts[-1](made)


def test_what_waits_for_room_is_refused_exactly_when_there_is_none() -> None:
    made = books(Setup(max_pending_cost=4), "a3")
    fitting, excessive, impossible = (books(Setup(), f"a{cost}").requests[0] for cost in (1, 2, 5))
    assert made.expected_at_arrival(fitting) == {"accepted"}
    assert made.expected_at_arrival(excessive) == {"Overloaded"}
    assert made.expected_at_arrival(impossible) == {"InvalidInput"}
    made.close(True)
    assert made.expected_at_arrival(fitting) == {"EncoderUnavailable"}


def test_a_lost_backend_is_to_be_built_again_so_many_times_and_then_nobody_is_served() -> None:
    made = books(Setup(max_rebuilds=2), "a1")
    decisions = []
    for _ in range(3):
        made.lose()
        decisions.append(made.hand_on())
    assert decisions == [True, True, False]
    assert made.requests[0].outcome == "unavailable"


def test_a_late_call_ends_what_it_holds_and_what_waits() -> None:
    now_s = 0.0
    made = books(Setup(forward_timeout_s=2.0, max_batch_items=1), "a1", "a1")
    made.clock = lambda: now_s
    begin(0)(made)
    now_s = 1.5
    assert made.watch() == 0.5
    now_s = 2.5
    assert made.watch() == 2.0
    assert [request.outcome for request in made.requests] == ["deadline", "unavailable"]
