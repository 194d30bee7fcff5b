"""Schedules that once broke a guarantee, as they were shrunk."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .driver import quiet, run
from .schedule import Arrive, Close, Leave, Lose, Memory, Setup, Spin, Step, Stick


@pytest.fixture(autouse=True)
def unlogged() -> Iterator[None]:
    with quiet():
        yield


def test_an_actor_that_has_given_up_keeps_no_exception() -> None:
    run(Setup(max_rebuilds=0), [Arrive(1, "a1~")])


def test_an_actor_that_has_given_up_keeps_no_request_of_a_caller_that_was_closed() -> None:
    run(
        Setup(max_rebuilds=0),
        [
            Stick(),
            Arrive(1, "a1"),
            Step(),
            Arrive(3, "a1", bare=True),
            Leave(3),
            Lose(),
        ],
    )


def test_what_ran_out_of_memory_is_remembered_when_the_rest_of_its_batch_has_left() -> None:
    run(
        Setup(),
        [
            Arrive(1, "a1# a1"),
            Step(),
            Leave(1),
            Arrive(3, "a1#"),
            Arrive(5, "a1 a1"),
        ],
    )


def test_what_ran_out_of_memory_is_remembered_when_the_rest_of_its_batch_has_failed() -> None:
    run(
        Setup(max_batch_items=2),
        [
            Arrive(3, "a1 a1"),
            Arrive(4, "a1? a1"),
            Step(),
            Arrive(9, "a6"),
            Memory(cost=1),
            Step(),
            Step(),
            Step(),
            Arrive(10, "a1 a1"),
        ],
    )


def test_a_full_batch_is_not_held_when_the_caller_before_it_has_left() -> None:
    run(
        Setup(max_batch_items=2, max_wait_s=1.5),
        [
            Arrive(1, "a1", loop=1),
            Arrive(4, "b1 b1"),
            Leave(1),
            Spin(loop=1),
        ],
    )


def test_an_actor_closed_while_it_loses_its_backend_keeps_no_request_of_one_who_left() -> None:
    run(Setup(), [Arrive(2, "a1", bare=True), Stick(), Step(), Leave(2), Close(), Lose()])


def test_a_batch_is_planned_for_those_of_whom_it_is_not_known_that_they_left() -> None:
    costs = {5: 3, 6: 3, 7: 1, 8: 2, 9: 2, 10: 1, 11: 2, 12: 7, 13: 2, 15: 3}
    arrivals = [Arrive(number, f"a{cost}") for number, cost in costs.items()]
    run(Setup(max_batch_cost=8), [*arrivals, Leave(12)])


def test_whoever_no_call_is_left_for_is_not_pending_until_the_caller_has_heard_of_it() -> None:
    bad = (4, 10, 14, 15, 18)
    arrivals = [
        Arrive(number, "a1!" if number in bad else "a1", loop=int(number == 16)) for number in range(3, 26)
    ]
    run(Setup(), [Memory(cost=3), *arrivals, Arrive(27, "a7"), Close(drain=True), Step()])
